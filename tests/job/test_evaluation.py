"""Scores while training: those of `unfreeze eval` on the same weights, felt by nothing, and the best step is theirs."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.parse import parse
from unfreeze.config.sft import Config
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import EventLog
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.tasks import Settings
from unfreeze.evaluate.text import TextTask
from unfreeze.job.watch.best import Best
from unfreeze.job.watch.evaluation import score_record
from unfreeze.report.html import page, summary_lines
from unfreeze.report.run import read_run

pytestmark = pytest.mark.usefixtures("fewer_layers")

ANSWERS = [{"question": f"What is number {i}?", "answer": f"Number {i}, it is. Hmm."} for i in range(20)]
HEADS = ["--shape.num-attention-heads", 2]
RECIPES = {
    "distill": ["--teacher", "base", "--alpha", 0.5],
    "prefer": ["--loss", "orpo"],
    "pretrain": [
        "--shape.family",
        "llama",
        "--shape.hidden-size",
        32,
        "--shape.num-hidden-layers",
        2,
        *HEADS,
    ],
    "grpo": ["--reward", "REWARD", "--rollout.max-new-tokens", 4, "--rollout.prompts-per-step", 2],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    pairs = [{"prompt": r["question"], "chosen": r["answer"], "rejected": "No."} for r in ANSWERS]
    texts = [{"text": r["answer"]} for r in ANSWERS]
    for name, rows in (("train", ANSWERS[:16]), ("test", ANSWERS[14:]), ("pairs", pairs), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "book.txt").write_text("A whale is seen. " * 40)
    (folder / "reward.py").write_text(
        "def reward(prompt, completion, **row):\n    return len(completion) % 3\n"
    )
    return folder


def trained(files, out, *more, recipe="sft", data="train", code=0):
    model = "--tokenizer" if recipe == "pretrain" else "--model"
    common = ["--quiet", model, TINY_K2, "--data", files / f"{data}.jsonl", "--out", out]
    common += ["--steps", 3, "--learning-rate", "0.01", "--watch.samples", 0, "--threads", 1]
    common += ["--dtype", "float32", "--optimizer.warmup", 0, "--optimizer.schedule", "constant"]
    if recipe == "sft":
        common += ["--tokens-per-step", 128, "--lora.rank", 1]
    torch.manual_seed(0)
    assert cli.main([recipe, *map(str, [*common, *more])]) == code
    return out


def events(run, kind):
    found = [json.loads(line) for line in (Path(run) / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


def weights(run):
    return load_file(run / "adapter" / "adapter_model.safetensors")


def scores(run):
    return [
        {key: value for key, value in event.items() if key not in ("time", "seconds")}
        for event in events(run, "score")
    ]


@pytest.fixture(scope="module")
def scored(files, tmp_path_factory):
    """A run whose text gets worse from step 1 on, as it is no Yoda's."""
    tasks = ["--eval", f"ppl:{files}/book.txt", f"rows:{files}/test.jsonl:contains", "--watch.eval-every", 1]
    out = tmp_path_factory.mktemp("runs") / "scored"
    return trained(files, out, *tasks, "--watch.eval-tokens", 4), tasks


def test_scores_are_those_of_the_weights_and_training_does_not_feel_them(files, scored, tmp_path):
    run, _ = scored
    found = scores(run)
    assert [event["step"] for event in found] == [step for step in range(4) for _ in range(3)]
    task = TextTask("ppl", files / "book.txt", Settings())
    task.check()
    for where, step in ((TINY_K2, 0), (run / "adapter", 3)):
        (bits, _) = task.score(unfreeze.load(where, dtype="float32"), Kept())
        first = next(event for event in found if event["step"] == step)
        assert first["value"] == pytest.approx(score_record("ppl", bits)["value"], rel=1e-5)
        assert first["low"] <= first["value"] <= first["high"] and first["chooses"]
    assert [event["chooses"] for event in found[:3]] == [True, False, False]
    plain = trained(files, tmp_path / "plain")
    mine, other = weights(run), weights(plain)
    assert all(torch.equal(mine[name], other[name]) for name in other)


def test_the_first_task_chooses_the_best_step_and_it_is_said(scored):
    run, _ = scored
    values = {event["step"]: event["value"] for event in scores(run) if event["chooses"] and event["step"]}
    best = min(values, key=values.__getitem__)
    state = json.loads((run / "state" / "step-000003" / "state.json").read_text())
    assert state["best"]["step"] == best and state["best"]["by"].startswith("ppl:")
    assert (run / "adapter-best").is_dir() == (best != 3)
    text = "\n".join(summary_lines(run))
    assert best == 3 or f"step {best} (ppl:" in text
    assert "Scores while training" in page(read_run(run))


def test_rows_of_the_evaluation_among_the_training_rows_are_named(scored):
    run, _ = scored
    (warning,) = [e["message"] for e in events(run, "warning") if "evaluation rows" in e["message"]]
    assert warning.startswith("2 training rows hold 2 evaluation rows")
    assert "train.jsonl row 15 holds test.jsonl row 1" in warning


def test_a_resumed_run_has_the_same_scores_and_the_same_best(files, scored, tmp_path):
    run, tasks = scored
    flags = [*tasks, "--watch.eval-tokens", 4, "--save.allow-changed", "steps"]
    parts = trained(files, tmp_path / "parts", *flags, "--steps", 2)
    trained(files, parts, *flags)
    assert [event for event in scores(parts) if event["step"] != 2] == [
        event for event in scores(run) if event["step"] != 2
    ]
    read = [json.loads((each / "state/step-000003/state.json").read_text()) for each in (run, parts)]
    assert read[0]["best"] == read[1]["best"]
    assert all(torch.equal(tensor, weights(parts)[name]) for name, tensor in weights(run).items())


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_scores(files, tmp_path, recipe):
    more = [files / "reward.py" if part == "REWARD" else part for part in RECIPES[recipe]]
    data = {"prefer": "pairs", "pretrain": "texts"}.get(recipe, "train")
    more += ["--eval", f"ppl:{files}/book.txt", "--watch.eval-every", 1, "--steps", 2]
    run = trained(files, tmp_path / "run", *more, recipe=recipe, data=data)
    assert [event["step"] for event in scores(run) if event["chooses"]] == [0, 1, 2]


def test_another_criterion_is_not_compared_and_patience_ends_the_run():
    kept = []
    state = SimpleNamespace(
        model=SimpleNamespace(looking=nullcontext),
        run=SimpleNamespace(events=EventLog(None)),
        step=0,
        best={"step": 1, "loss": 3.0},  # the held-out loss's
        stale=0,
        ended=False,
    )
    best = Best(lambda state: kept.append(state.step) or True, patience=2, by="needle")
    for state.step, loss in ((2, 9.0), (3, None), (4, 8.0), (5, 8.0), (6, 8.5)):
        best(state, loss, last=False)
    assert kept == [2, 4] and state.best == {"step": 4, "loss": 8.0, "by": "needle"} and state.ended


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--watch.eval-every", "2"], "watch.eval_every has no tasks"),
        (["--eval", "needle", "--watch.early-stop", "2"], "also give watch.eval_every"),
    ],
)
def test_half_a_setting_is_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        parse(Config, ["--model", "m", "--data", "d", *flags], command="sft", description="")


def test_a_task_that_is_not_there_is_refused_before_any_weight(files, tmp_path, capsys):
    trained(files, tmp_path / "run", "--eval", "rows:gone.jsonl", code=2)
    assert "no file gone.jsonl" in capsys.readouterr().err and not (tmp_path / "run").exists()
