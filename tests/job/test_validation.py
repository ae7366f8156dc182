"""Validation inside training: the numbers are those of a direct computation, training does not feel it, and
the best save stays."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.parse import parse
from unfreeze.config.sft import Config
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import EventLog
from unfreeze.data import Example, encode_files, load_tokenizer
from unfreeze.data.packing.split import split_by_content
from unfreeze.evaluate import perplexity
from unfreeze.evaluate.perplexity import HeldoutLoss
from unfreeze.job.watch.validation import Validation, supervised_bytes
from unfreeze.models import Decoder
from unfreeze.report.html import summary_lines

pytestmark = pytest.mark.usefixtures("fewer_layers")

ANSWERS = [{"question": f"What is number {i}?", "answer": f"Number {i}, it is. Hmm."} for i in range(24)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Training rows and held-out rows."""
    folder = tmp_path_factory.mktemp("rows")
    for name, part in (("train", ANSWERS[:16]), ("held", ANSWERS[16:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder / "train.jsonl", folder / "held.jsonl"


def sft(rows: tuple[Path, Path], out: Path, *more: object, code: int = 0) -> Path:
    command = [
        "sft",
        "--quiet",
        "--model",
        TINY_K2,
        "--data",
        rows[0],
        "--out",
        out,
        "--tokens-per-step",
        128,
        "--steps",
        4,
        "--lora.rank",
        1,
        "--learning-rate",
        "0.01",
        "--watch.samples",
        0,
        "--threads",
        1,
        "--dtype",
        "float32",
        "--optimizer.warmup",
        0,
        *more,
    ]
    # as a fresh process has it; nothing in training draws from it but the planted noise below
    torch.manual_seed(0)
    assert cli.main([str(part) for part in command]) == code
    return out


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


def trained(run: Path) -> list[tuple[Any, ...]]:
    return [
        (event["step"], event["loss"], event["grad_norm"], str(event["expert_load"]))
        for event in events(run, "train")
    ]


@pytest.fixture(scope="module")
def validated(rows: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, fewer_layers: None) -> Path:
    out = tmp_path_factory.mktemp("validated") / "run"
    return sft(
        rows,
        out,
        "--validation",
        rows[1],
        "--watch.validate-every",
        1,
        "--watch.prompts",
        "Who are you?",
        "What is number 3?",
    )


def direct(model: Any, path: Path) -> tuple[float, int, int]:
    """(sum of -log p over the answers, their tokens, their bytes), a row at a time through the model's own
    logits."""
    total, tokens, size = 0.0, 0, 0
    for row in map(json.loads, path.read_text().splitlines()):
        chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        whole = model.tokenizer.template.render(chat, add_generation_prompt=False)
        ids = model.tokenizer.encode(whole, specials=True)
        prompt = model.tokenizer.encode(
            model.tokenizer.template.render(chat[:1], add_generation_prompt=True), specials=True
        )
        assert ids[: len(prompt)] == prompt
        scores = F.log_softmax(model.logits([ids])[0].double(), -1)
        for place in range(len(prompt), len(ids)):
            total -= float(scores[place - 1, ids[place]])
            tokens += 1
        size += len(row["answer"].encode())
    return total, tokens, size


def test_loss_perplexity_and_bits_per_byte_are_those_of_a_direct_computation(
    validated: Path, rows: tuple[Path, Path]
):
    first, *_, last = events(validated, "eval")
    assert (first["step"], last["step"]) == (0, 4)
    for event, source in ((first, TINY_K2), (last, validated / "adapter")):
        total, tokens, size = direct(unfreeze.load(source, dtype="float32"), rows[1])
        assert event["tokens"] == tokens
        assert event["loss"] == pytest.approx(total / tokens, rel=1e-5)
        assert event["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
        assert event["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)


def test_its_changes_are_those_of_the_losses_and_a_resumed_run_has_the_same(
    validated: Path, rows: tuple[Path, Path], tmp_path: Path
):
    """Since step 0, and since the lowest loss before; also where the run was killed in between."""
    evals = events(validated, "eval")
    losses = {event["step"]: event["loss"] for event in evals}
    assert evals[0]["changes"] == [] and {event["rows"] for event in evals} == {8}
    for event in evals[1:]:
        changes = {each["since"]: each for each in event["changes"]}
        before = {step: loss for step, loss in losses.items() if step < event["step"]}
        assert changes.keys() == {0, min(before, key=before.__getitem__)}
        for since, each in changes.items():
            assert each["change"] == pytest.approx(event["loss"] - losses[since], abs=1e-6)
            assert each["measure"] == "loss" and 0 < each["error"] < 1
    parts = tmp_path / "parts"
    flags = ["--validation", rows[1], "--watch.validate-every", 1, "--optimizer.schedule", "constant"]
    flags += ["--save.allow-changed", "steps"]
    sft(rows, parts, *flags, "--steps", 2)
    sft(rows, parts, *flags, "--steps", 4)
    whole = sft(rows, tmp_path / "whole", *flags, "--steps", 4)
    changes = [[event["changes"] for event in events(run, "eval")] for run in (parts, whole)]
    assert changes[0][-1] == changes[1][-1] and len(changes[1][-1]) == 2


def test_own_prompts_are_answered_before_during_and_after(validated: Path):
    found = events(validated, "sample")
    assert [(event["step"], event["when"], event["index"]) for event in found] == [
        (step, when, index)
        for step, when in ((0, "before"), (1, "during"), (2, "during"), (3, "during"), (4, "after"))
        for index in (0, 1)
    ]
    assert [event["prompt"] for event in found[:2]] == ["Who are you?", "What is number 3?"]
    model = unfreeze.load(validated, dtype="float32")
    assert [event["text"] for event in found[-2:]] == [
        model.chat(prompt, temperature=0, max_new_tokens=64)
        for prompt in ("Who are you?", "What is number 3?")
    ]


@pytest.mark.parametrize("held_out", [True, False])
def test_samples_are_of_held_out_rows_where_there_are_any_and_not_at_validations(
    rows: tuple[Path, Path], tmp_path: Path, held_out: bool
):
    flags = ["--validation-fraction", "0.3", "--watch.validate-every", 1] if held_out else []
    run = sft(rows, tmp_path / "run", *flags, "--watch.samples", 2, "--steps", 2)
    said = events(run, "sample")
    assert [event["when"] for event in said] == ["before", "before", "after", "after"]
    source = "held-out data" if held_out else "training data"
    assert {event["source"] for event in said} == {source}
    dataset = encode_files([rows[0]], load_tokenizer(TINY_K2), 128)
    if held_out:
        trained_on, kept_out = split_by_content(dataset.examples, 0.3, 0)
        asked = {ANSWERS[row - 1]["question"] for row in kept_out.rows_N.tolist()}
        assert {event["prompt"] for event in said} <= asked
        assert not asked & {ANSWERS[row - 1]["question"] for row in trained_on.rows_N.tolist()}
    assert all(event["seconds"] > 0 for event in events(run, "gap"))
    summary = "\n".join(summary_lines(run))
    assert "answers" in summary.split("Time ")[1].splitlines()[0]


def test_samples_ask_each_prompt_once(tmp_path: Path):
    """Three answers to each of three questions: two samples ask two questions, the same ones when it goes on."""
    file = tmp_path / "several.jsonl"
    asked = [f"What is {name}?" for name in ("gold", "tin", "iron")]
    file.write_text(
        "".join(json.dumps({"question": q, "answer": f"{a}."}) + "\n" for q in asked for a in ("A", "B", "C"))
    )
    found = {}
    for count in (2, 9):
        run = sft((file, file), tmp_path / f"run-{count}", "--watch.samples", count, "--steps", 1)
        found[count] = [event["prompt"] for event in events(run, "sample") if event["when"] == "before"]
    assert found == {2: asked[:2], 9: asked}


def test_training_does_not_feel_it(validated: Path, rows: tuple[Path, Path], tmp_path: Path):
    """Losses, gradient norms, expert counts and the whole saved state, bit for bit, with and without."""
    plain = sft(rows, tmp_path / "plain")
    assert trained(plain) == trained(validated) and not events(plain, "eval")
    name = "state/step-000004/tensors.safetensors"
    assert (plain / name).read_bytes() == (validated / name).read_bytes()


def drawing(model: Any, batches: Any, **options: Any) -> HeldoutLoss:
    """A measurement that is careless: it draws from torch's global RNG and counts tokens for experts."""
    torch.rand(3)
    for moe in model.moe_layers().values():
        moe.counts_E += 7
    return HeldoutLoss(loss=1.0, perplexity=2.7, bits_per_byte=None, tokens=3)


def with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that draws random numbers: dropout on each layer's input."""
    from unfreeze import models

    def noisy(layer: Any, x_TD: Any, run: Any) -> Any:
        return models.plain(layer, F.dropout(x_TD, 0.1), run)

    monkeypatch.setitem(models.RECOMPUTE, "nothing", noisy)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_careless_measurement_is_undone_and_the_control_arm_without_that_is_felt(
    rows: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool
):
    with_noise(monkeypatch)
    monkeypatch.setattr(perplexity, "heldout", drawing)
    if not guarded:
        monkeypatch.setattr(Decoder, "looking", lambda model: nullcontext())
    plain = sft(rows, tmp_path / "plain", "--place.recompute", "nothing")
    looked_at = sft(
        rows,
        tmp_path / "looked at",
        "--place.recompute",
        "nothing",
        "--validation",
        rows[1],
        "--watch.validate-every",
        1,
    )
    assert (trained(plain) == trained(looked_at)) is guarded


def scripted(losses: dict[int, float]) -> Any:
    """heldout with the losses of a script, a call after the other."""
    left = list(losses.values())

    def heldout(model: Any, batches: Any, **options: Any) -> HeldoutLoss:
        loss = left.pop(0)
        return HeldoutLoss(loss=loss, perplexity=math.exp(loss), bits_per_byte=None, tokens=1)

    return heldout


def test_the_best_save_outlives_pruning_and_is_written_at_the_end(
    rows: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        perplexity, "heldout", scripted({0: 9.0, 1: 3.0, 2: 2.0, 3: 5.0, 4: math.nan, 5: 4.0, 6: 4.5})
    )
    run = sft(
        rows,
        tmp_path / "run",
        "--validation",
        rows[1],
        "--watch.validate-every",
        1,
        "--steps",
        6,
        "--save-every",
        1,
        "--save.keep",
        1,
    )
    assert sorted(path.name for path in (run / "state").iterdir()) == ["step-000002", "step-000006"]
    assert json.loads((run / "state" / "step-000006" / "state.json").read_text())["best"] == {
        "step": 2,
        "loss": 2.0,
    }
    (unknown,) = [event for event in events(run, "eval") if event["loss"] is None]
    assert unknown["step"] == 4 and [event["message"] for event in events(run, "warning")] == [
        "the held-out loss is nan"
    ]

    other = sft(rows, tmp_path / "other", "--steps", 6, "--save-every", 1, "--save.keep", 6)
    trainable = load_file(run / "state" / "step-000002" / "tensors.safetensors")
    assert all(
        torch.equal(tensor, trainable[name])
        for name, tensor in load_file(other / "state/step-000002/tensors.safetensors").items()
    )
    ids = [[5, 6, 7, 8]]
    best, last = (
        unfreeze.load(run / name, dtype="float32").logits(ids)[0] for name in ("adapter-best", "adapter")
    )
    assert not torch.equal(best, last) and torch.equal(
        last, unfreeze.load(run, dtype="float32").logits(ids)[0]
    )
    assert not torch.equal(best, unfreeze.load(TINY_K2, dtype="float32").logits(ids)[0])


@pytest.mark.parametrize("room", [True, False])
def test_a_lowest_loss_whose_save_had_no_room_is_not_the_best(room: bool):
    kept: list[dict[str, Any]] = []

    def keep(state: Any) -> bool:
        kept.append(state.best)
        return room

    state: Any = SimpleNamespace(
        model=SimpleNamespace(looking=nullcontext),
        run=SimpleNamespace(events=EventLog(None)),
        schedule=SimpleNamespace(steps=9),
        step=0,
        best={"step": 1, "loss": 3.0},
        stale=0,
    )
    losses = iter([2.0, 2.5])
    hook = Validation(state, lambda: HeldoutLoss(next(losses), 1.0, None, 1), every=2, keep=keep)
    for state.step in (2, 3, 4):
        hook(state, None)  # type: ignore[arg-type]
    assert kept[0] == {"step": 2, "loss": 2.0} and state.best == (
        {"step": 2, "loss": 2.0} if room else {"step": 1, "loss": 3.0}
    )
    assert len(kept) == (1 if room else 2)  # 2.5 at step 4 is tried where 2.0 could not be kept


PATIENT = ["--watch.validate-every", 1, "--steps", 8, "--save-every", 1, "--save.keep", 9]
LOSSES = [9.0, 3.0, 2.0, 5.0, math.nan, 2.0]  # before the first step, then of each


def test_early_stop_ends_after_so_many_validations_without_gain_and_resumes_within_them(
    rows: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Three after step 2: a higher loss, none, and the same. A kill between them changes nothing."""
    flags = ["--validation", rows[1], *PATIENT, "--watch.early-stop", 3]

    def run(out: Path, losses: list[float], *more: object) -> list[dict[str, Any]]:
        monkeypatch.setattr(perplexity, "heldout", scripted(dict(enumerate(losses))))
        sft(rows, out, *flags, *more)
        return events(out, "early_stop")

    whole = tmp_path / "whole"
    (stopped,) = run(whole, LOSSES)
    wanted = {"step": 5, "validations": 3, "best_step": 2, "best_loss": 2.0}
    assert {name: stopped[name] for name in wanted} == wanted
    assert trained(whole)[-1][0] == 5 and events(whole, "end")[0]["reason"] == "done"
    summary = "\n".join(summary_lines(whole))
    assert "stopped early after step 5 of 8" in summary and "Stopped at step 5: 3 validations" in summary
    assert "The best one (step 2, loss 2.000) is in adapter-best/." in summary
    assert (
        unfreeze.load(whole, dtype="float32").logits([[5, 6]])[0].shape
    )  # the last state; the best is beside it
    assert {"adapter", "adapter-best"} <= {path.name for path in whole.iterdir()}
    cards = [(whole / name / "README.md").read_text() for name in ("adapter", "adapter-best")]
    assert ["lowest held-out loss" in text for text in cards] == [False, True]

    # a run that was killed after step 4, in the middle of its patience
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    for name in ("state/step-000005", "adapter", "adapter-best"):
        shutil.rmtree(killed / name)
    (again,) = run(killed, LOSSES[5:])
    assert {name: again[name] for name in wanted} == wanted and trained(killed) == trained(whole)

    # one that was killed after its last save, before the result was written: only that is left to do
    late = tmp_path / "late"
    shutil.copytree(whole, late)
    for name in ("adapter", "adapter-best"):
        shutil.rmtree(late / name)
    run(late, [])
    assert trained(late) == trained(whole)
    assert {"adapter", "adapter-best"} <= {path.name for path in late.iterdir()}

    # it is finished: nothing is trained or measured again; with more patience it goes on
    assert run(killed, []) == [again]
    assert run(killed, [1.0] + 9 * [1.5], "--watch.early-stop", 9, "--save.allow-changed", "early_stop") == [
        again
    ]
    assert trained(killed)[-1][0] == 8


def test_validate_every_is_refused_where_nothing_is_held_out(rows: tuple[Path, Path], tmp_path: Path, capsys):
    words = ["sft", "--model", str(TINY_K2), "--data", str(rows[0]), "--out", str(tmp_path / "r")]
    assert cli.main([*words, "--watch.validate-every", "3"]) == 2
    assert "validate_every measures the held-out loss, but nothing is held out" in capsys.readouterr().err


def test_early_stop_is_refused_before_work_without_validations(rows: tuple[Path, Path], tmp_path: Path):
    for flags, said in (
        ([], "nothing is held out"),
        (["--validation", rows[1]], "also give watch.validate_every"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(
                Config,
                ["--model", "m", "--data", "d", "--watch.early-stop", "3", *map(str, flags)],
                command="sft",
                description="",
            )


def test_bytes_of_a_span_leave_special_tokens_out_and_count_unicode():
    tokenizer = load_tokenizer(TINY_K2)
    ids = tokenizer.encode("Hmm, “é” it is.", specials=False)
    end = next(iter(tokenizer.eos_ids))
    everything = Example(tokens=[ids[0], *ids, end], weights=[0.0, *[1.0] * len(ids), 1.0])
    assert supervised_bytes([everything], tokenizer) == len("Hmm, “é” it is.".encode())
    tail = Example(tokens=ids, weights=[0.0] * (len(ids) - 1) + [1.0])
    assert supervised_bytes([tail], tokenizer) == len(tokenizer.decode(ids[-1:]).encode())
    # the first token is no target
    assert supervised_bytes([Example(tokens=ids, weights=[1.0] + [0.0] * (len(ids) - 1))], tokenizer) == 0


def test_other_held_out_rows_are_refused_on_resume_or_compared_anew(
    rows: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
):
    """Equal counts of tokens: nothing but the fingerprint tells the files apart."""
    held = tmp_path / "held.jsonl"
    shutil.copy(rows[1], held)
    flags = ["--validation", held, "--watch.validate-every", 2]
    run = sft(rows, tmp_path / "run", *flags)
    changed = [{**row, "answer": row["answer"].replace("it is", "is it")} for row in ANSWERS[16:]]
    held.write_text("".join(json.dumps(row) + "\n" for row in changed))
    more = ["--steps", 8, "--save.allow-changed", "steps"]
    capsys.readouterr()
    sft(rows, run, *flags, *more, code=2)
    said = capsys.readouterr().err
    assert (
        "differ from those of the saved held-out loss" in said
        and "--save.allow-changed training.steps data.validation" in said
    )
    assert [event["step"] for event in events(run, "eval")] == [0, 2, 4]

    # a save of an earlier version has no fingerprint: it is read, and the rows count as the same
    old = tmp_path / "old"
    shutil.copytree(run, old)
    for path in (old / "state").glob("*/state.json"):
        record = json.loads(path.read_text())
        assert record["heldout"].pop("fingerprint")
        path.write_text(json.dumps(record))
    sft(rows, old, *flags, *more)
    assert {each["since"] for each in events(old, "eval")[-1]["changes"]} >= {0}

    sft(rows, run, *flags, *more, "validation")
    told = events(run, "eval")
    assert [event["step"] for event in told] == [0, 2, 4, 4, 6, 8]
    assert (
        len({event["fingerprint"] for event in told[:3]} ^ {event["fingerprint"] for event in told[3:]}) == 2
    )
    assert told[3]["changes"] == [] and {each["since"] for each in told[-1]["changes"]} <= {4, 6}
    best = json.loads((run / "state/step-000008/state.json").read_text())["best"]
    assert best["step"] in (6, 8)  # not one of the other rows
    summary = "\n".join(summary_lines(run))
    assert f"{told[0]['loss']:.3f}" not in summary and "(since step 4)" in summary
