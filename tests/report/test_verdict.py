"""The sentence on top of the page, by hand; and the command that makes the run once more, read back by the
command line itself."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from unfreeze.config.names import flat, given
from unfreeze.config.parse import parse
from unfreeze.job.folder import write_resolved
from unfreeze.recipes import pretrain, sft
from unfreeze.report.events import ENOUGH_STEPS
from unfreeze.report.run import read_run
from unfreeze.report.verdict import again, change, evaluation_rows, machine_rows, verdict

START = {"kind": "start", "step": 0, "steps": 3, "model": "/models/tiny-k2", "data": "/data/yoda.jsonl"}
DATA = {"kind": "data", "step": 0, "examples": 1219, "shapes": {"question/answer": 1219}}
END = {"kind": "end", "step": 3, "reason": "done"}


def train(*losses: float) -> list[dict[str, Any]]:
    return [
        {"kind": "train", "step": i, "loss": loss, "seconds": 30.0} for i, loss in enumerate(losses, start=1)
    ]


def evals(**scores: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"kind": "eval", "step": step, **{name: pair[i] for name, pair in scores.items()}}
        for i, step in enumerate((0, 3))
    ]


def answers(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"kind": "sample", "step": step, "when": when, "index": index, "prompt": "?", "text": pair[i]}
        for i, (when, step) in enumerate((("before", 0), ("after", 3)))
        for index, pair in enumerate(pairs)
    ]


LEARNT = "tiny-k2 learnt 1,219 answers of yoda.jsonl in 1 min 30 s: "
TRAINED = "tiny-k2 was trained on 1,219 answers of yoda.jsonl in 1 min 30 s: "
SAID = [
    (
        [*train(3, 2, 1), *evals(style=(0.0, 98.29), facts=(100.0, 99.15)), END],
        LEARNT + "style 0 → 98 %, facts 100 → 99 %.",
    ),
    (
        [*train(3, 2, 1), *evals(loss=(2.5, 1.75), tokens=(10, 10)), END],
        LEARNT + "held-out loss 2.500 → 1.750.",
    ),
    ([*train(3, 2, 1), *evals(loss=(2.5, 2.75)), END], TRAINED + "held-out loss 2.500 → 2.750."),
    ([*train(3, 2, 1), END], LEARNT + "loss 3.000 → 1.000."),
    ([*train(1, 2, 3), END], TRAINED + "loss 1.000 → 3.000."),
    (
        [*train(3, 2, 1), *answers(("a", "a"), ("b", "b")), END],
        TRAINED + "loss 3.000 → 1.000; its 2 sample answers are the same as before.",
    ),
    (
        [*train(3, 2, 1), *evals(loss=(2.5, 1.75)), *answers(("a", "a")), END],
        TRAINED + "held-out loss 2.500 → 1.750; its sample answer is the same as before.",
    ),
    # control arms: one answer that changed, and scores
    ([*train(3, 2, 1), *answers(("a", "a"), ("b", "c")), END], LEARNT + "loss 3.000 → 1.000."),
    ([*train(3, 2, 1), *evals(style=(0.0, 98.0)), *answers(("a", "a")), END], LEARNT + "style 0 → 98 %."),
    (
        [*train(3, 2, 1), *evals(accuracy=(0.5, 1.0), margin=(0.0, 8.4)), END],  # 0.5 is not 0
        LEARNT + "accuracy 0.50 → 1.00, margin 0.00 → 8.40.",
    ),
    ([*train(1, 1, 1), END], TRAINED + "loss 1.000 → 1.000."),
    (
        train(3, 2),
        (
            "tiny-k2 was trained on 1,219 answers of yoda.jsonl; unfinished after step 2 of 3 and 1 min 00 s: loss"
            " 3.000 → 2.000."
        ),
    ),
    (
        [*train(3, 2), {**END, "step": 2, "reason": "interrupted"}],
        (
            "tiny-k2 was trained on 1,219 answers of yoda.jsonl; interrupted after step 2 of 3 and 1 min 00 s: loss"
            " 3.000 → 2.000."
        ),
    ),
    ([], "tiny-k2 has made no training step."),
]


@pytest.fixture(autouse=True)
def two_steps_are_enough(monkeypatch):
    monkeypatch.setattr("unfreeze.report.verdict.ENOUGH_STEPS", 2)


def made(folder: Path, events: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if config is not None:
        (folder / "resolved_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "tokens, said",
    [
        (100, "was trained on 30 % of 1,219 answers of"),
        (300, "learnt 1,219 answers of"),
        (3000, "learnt 1,219 answers of"),
    ],
)
def test_a_run_within_its_first_epoch_says_how_much_it_saw(tokens, said, tmp_path):
    steps = [step | {"tokens": tokens} for step in train(3, 2, 1)]
    events = [START, DATA | {"tokens": 1000}, *steps, END]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert said in verdict(read_run(tmp_path))


@pytest.mark.parametrize("events, words", SAID)
def test_the_sentence(tmp_path: Path, events: list[dict[str, Any]], words: str):
    assert verdict(read_run(made(tmp_path, [START, DATA, *events]))) == words


def test_what_it_learnt_is_named_as_far_as_it_is_known(tmp_path: Path):
    def said(events: list[dict[str, Any]], config: dict[str, Any]) -> str:
        return verdict(read_run(made(tmp_path, [*events, *train(2, 1), END], config)))

    mixed = {**DATA, "shapes": {"question/answer": 1, "text": 2}}
    assert said([mixed], {"model": "org/m", "data": ["a", "b"]}).startswith(
        "m learnt 1,219 documents of 2 files in"
    )
    assert said([], {"data": "x/chat.jsonl"}).startswith("The model learnt chat.jsonl in 1 min 00 s")
    assert said([], {}).startswith("The model learnt its data in")


def test_digits_are_as_many_as_tell_the_two_apart():
    assert (
        change([0.0, 98.29]) == "0 → 98"
        and change([97.9, 98.29]) == "97.9 → 98.3"
        and change([98.0, 98.0]) == "98 → 98"
    )
    assert (
        change([1.0, 2.0, 1.5], 3) == "1.000 → 1.500"
        and change([1e-9, 2e-9]) == "0.0000 → 0.0000"
        and change([0.5]) == "0.50"
    )


def test_the_loss_of_preference_is_no_loss_of_tokens(tmp_path: Path):
    steps = [event | {"margin": 0.5} for event in train(3, 2)]
    evaluated = [{"kind": "eval", "step": 1, "loss": 0.69}]
    (row,) = evaluation_rows(read_run(made(tmp_path, [*steps, *evaluated])))
    assert row[:2] == ("held-out loss", "mean over pairs, or answers with a label")


def test_evaluations_have_units_and_steps(tmp_path: Path):
    events = [
        {"kind": "eval", "step": step, "loss": loss, "mine": 1.0}
        for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5))
    ]
    assert evaluation_rows(read_run(made(tmp_path, events))) == [
        ("held-out loss", "nats per token", "2 (step 1)", "1.5 (step 3)", "1 (step 2)", "2 (step 1)"),
        ("mine", "", "1 (step 1)", "1 (step 3)", "1 (step 1)", "1 (step 1)"),
    ]


RUNS = [
    (
        sft.Config,
        "sft",
        ["--model", "a b", "--data", "/x.jsonl", "/y's.jsonl", "--lora.rank", "4", "--learning-rate", "1e-3"],
    ),
    (
        sft.Config,
        "sft",
        [
            "--model",
            "m",
            "--data",
            "/x.jsonl",
            "--template-variables",
            "enable_thinking=false",
            "--clip",
            "0",
        ],
    ),
    (
        pretrain.Config,
        "pretrain",
        ["--model", "m", "--data", "/x.txt", "--steps", "5", "--tokens-per-step", "64"],
    ),
]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("config, recipe, flags", RUNS)
def test_the_command_makes_the_same_config(
    tmp_path: Path, config: Any, recipe: str, flags: list[str], recorded: bool
):
    """As the run folder records it; and from a folder of an earlier version, which doesn't say which fields
    were given."""
    typed = parse(config, [*flags, "--out", str(tmp_path)], command=recipe, description="")
    run = read_run(made(tmp_path, train(1.0)))
    write_resolved(run, typed, recipe, "2026-11-22", **({"steps": 3} if recorded else {}))
    command = again(read_run(tmp_path))
    assert command.startswith(f"unfreeze {recipe} --model") and command.endswith(f"--out {tmp_path}-again")
    assert not recorded or len(shlex.split(command)) == len(flags) + 4  # nothing but what was typed
    back = parse(config, shlex.split(command)[2:], command=recipe, description="")
    own = {"out", *(() if recorded else ("template_date",))}
    values, typed_values = flat(back), flat(typed)
    assert {k: v for k, v in values.items() if k not in own} == {
        k: v for k, v in typed_values.items() if k not in own
    }


def test_versions_and_machine_are_recorded_and_shown(tmp_path: Path):
    config = sft.Config(model="m", data="x", out=str(tmp_path))
    plan = {"kind": "plan", "step": 0, "lines": ["plan for Some CPU: 2 cores, 3.0 GiB", "  base 1 B"]}
    write_resolved(read_run(made(tmp_path, [plan])), config, "sft", "2026-11-22", device="cpu")
    rows = dict(machine_rows(read_run(tmp_path)))
    assert rows["Machine"] == "Some CPU: 2 cores, 3.0 GiB" and rows["Device"] == "cpu" and "System" in rows
    assert rows["Versions"].startswith("python 3.") and ", torch 2." in rows["Versions"]
    assert given(config) == ["model", "data", "out"]


def test_without_a_config_there_is_no_command(tmp_path: Path):
    run = read_run(made(tmp_path, train(1.0)))
    assert again(run) == "" and machine_rows(run) == []


@pytest.mark.parametrize("fraction, trained", [(0.1, "1,097"), (0.0, "1,219")])
def test_rows_that_were_held_out_are_not_learnt(fraction, trained, tmp_path):
    events = [START, DATA | {"held_out": 122}, *train(3, 2), END]
    run = made(tmp_path, events, {"data": "yoda.jsonl", "validation_fraction": fraction})
    assert f"learnt {trained} answers of yoda.jsonl" in verdict(read_run(run))


@pytest.mark.parametrize(
    "steps, samples, learnt", [(3, 0, False), (39, 0, False), (40, 0, True), (3, 1, True)]
)
def test_a_loss_of_few_steps_is_no_learning_where_no_answers_show_it(
    steps, samples, learnt, tmp_path, monkeypatch
):
    """Each step has other rows, so their losses differ. Sample answers that changed are seen."""
    monkeypatch.setattr("unfreeze.report.verdict.ENOUGH_STEPS", ENOUGH_STEPS)
    shown = [
        {"kind": "sample", "step": step, "when": when, "prompt": "p", "text": when, "index": 0}
        for step, when in ((0, "before"), (steps, "after")) * samples
    ]
    losses, end = range(steps, 0, -1), {**END, "step": steps}
    said = verdict(read_run(made(tmp_path / "r", [START, DATA, *train(*losses), *shown, end])))
    assert ("learnt" in said) == learnt != ("was trained on" in said)


@pytest.mark.parametrize("steps, learnt", [(3, False), (4, True)])
def test_of_too_few_steps_no_run_learns_and_the_remedy_is_said(steps, learnt, tmp_path):
    """Control arm: the warning is of a start with fewer steps than the run made, after --allow-changed."""
    few = "3 epochs of this data are only 3 steps of 4,096 tokens, which teach little: --epochs 40, or --tok"
    warned = {"kind": "warning", "step": 0, "message": few}
    losses = range(steps, 0, -1)
    end = {**END, "step": steps}
    said = verdict(read_run(made(tmp_path / "r", [START, DATA, warned, *train(*losses), end])))
    assert said.endswith("→ 1.000." if learnt else "→ 1.000. Too few steps to learn much: --epochs 40.")
    assert ("was trained on" in said) != learnt and ("learnt" in said) == learnt


def test_the_warning_that_the_verdict_knows_is_the_one_that_a_run_emits():
    from unfreeze.config.tables import Training
    from unfreeze.job.data import few_steps
    from unfreeze.report.events import TEACH_LITTLE

    words, remedy = few_steps(Training(epochs=3), 3)
    assert TEACH_LITTLE in words and "are only 3 steps of" in words
    assert remedy.startswith("--epochs 40, or ")
