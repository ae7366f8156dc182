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
from unfreeze.config.sft import ALL_RATE
from unfreeze.job.end.folder import write_resolved
from unfreeze.recipes import pretrain, sft
from unfreeze.report.learnt import change
from unfreeze.report.run import facts, read_run
from unfreeze.report.verdict import (
    UNITS,
    evaluation_note,
    evaluation_rows,
    evaluations,
    machine_rows,
    rerun_command,
    subject,
    verdict,
)
from unfreeze.tracking.live import eval_words

START = {"kind": "start", "step": 0, "steps": 3, "model": "/models/tiny-k2", "data": "/data/yoda.jsonl"}
DATA = {"kind": "data", "step": 0, "examples": 1219, "shapes": {"question/answer": 1219}}
END = {"kind": "end", "step": 3, "reason": "done"}


RECEIPT = {
    "kind": "receipt",
    "step": 1,
    "groups": {"mlp": {"parameters": 9, "trained": 9, "moved": 0.1, "output_change": 0.5, "rounding": 1e-6}},
}


def train(*losses: float) -> list[dict[str, Any]]:
    """Steps that take a minute and a half together."""
    each = 90.0 / len(losses)
    return [
        {"kind": "train", "step": i, "loss": loss, "seconds": each, "learning_rate": 1e-3}
        for i, loss in enumerate(losses, start=1)
    ]


FEW = train(3, 3, 2, 2, 2, 2, 1, 1)
FALLS = train(*[3] * 10, *[2] * 20, *[1] * 10)
ROSE = "The training loss rose by 2.000. Lower --learning-rate."
QUARTERS = " (mean of the first and the last quarter; no rows were held out)"


def evals(error: float = 0.01, rows: int = 40, **scores: tuple[float, float]) -> list[dict[str, Any]]:
    """Two validations, and the changes between them with one error for all."""
    changes = [
        {"measure": name, "since": 0, "change": pair[1] - pair[0], "error": error * abs(pair[0] or 1)}
        for name, pair in scores.items()
    ]
    ends = [{"kind": "eval", "step": step, "rows": rows} for step in (0, 8)]
    for i, end in enumerate(ends):
        end |= {name: pair[i] for name, pair in scores.items()}
    return [ends[0], {**ends[1], "changes": changes}]


def answers(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"kind": "sample", "step": step, "when": when, "index": index, "prompt": "?", "text": pair[i]}
        for i, (when, step) in enumerate((("before", 0), ("after", 8)))
        for index, pair in enumerate(pairs)
    ]


LEARNT = "tiny-k2 learnt 1,219 answers of yoda.jsonl in 1 min 30 s of training: "
TRAINED = "tiny-k2 was trained on 1,219 answers of yoda.jsonl in 1 min 30 s of training: "
SAID = [
    (
        [*FALLS, *evals(style=(0.0, 98.29), facts=(100.0, 99.15)), END],
        LEARNT + "style 0 → 98 %, facts 100 → 99 %.",
    ),
    ([*FALLS, *evals(loss=(2.5, 1.75)), END], LEARNT + "held-out loss 2.500 → 1.750."),
    (
        [*FALLS, *evals(loss=(2.5, 2.75)), END],
        TRAINED + "held-out loss 2.500 → 2.750. It got worse on unseen rows: held-out loss rose by"
        " 0.250. Lower --learning-rate, or train on more rows.",
    ),
    ([*FALLS, END], LEARNT + "training loss 3.000 → 1.000" + QUARTERS + "."),
    (  # random letters do this
        [*FEW, END],
        TRAINED + f"training loss 3.000 → 1.000{QUARTERS}. 8 steps without sample answers are too few to"
        " tell: add --validation-fraction 0.1.",
    ),
    ([*FEW, *answers(("a", "a"), ("b", "c")), END], LEARNT + f"training loss 3.000 → 1.000{QUARTERS}."),
    ([*train(1, 1, 2, 2, 2, 2, 3, 3), END], TRAINED + f"training loss 1.000 → 3.000{QUARTERS}. {ROSE}"),
    ([*train(3, 2, 1), END], TRAINED + "loss 3.000 → 1.000."),  # a step is no mean
    (
        [*FALLS, *answers(("a", "a"), ("b", "b")), END],
        TRAINED + f"training loss 3.000 → 1.000{QUARTERS}; its 2 sample answers are the same as before.",
    ),
    (
        [*FALLS, *evals(loss=(2.5, 1.75)), *answers(("a", "a")), END],
        TRAINED + "held-out loss 2.500 → 1.750; its sample answer is the same as before.",
    ),
    (  # held-out loss proves it; the words stay honest about the answers
        [*FALLS, *evals(loss=(2.5, 1.75)), *answers(("a", "a"), ("b", "b"), ("b", "c")), END],
        LEARNT + "held-out loss 2.500 → 1.750; 2 of its 3 sample answers are the same as before.",
    ),
    # control arm: one answer that changed
    ([*FALLS, *answers(("a", "a"), ("b", "c")), END], LEARNT + f"training loss 3.000 → 1.000{QUARTERS}."),
    (
        [*FALLS, *answers(("a", "a"), ("b", "b"), ("b", "c")), END],
        TRAINED + f"training loss 3.000 → 1.000{QUARTERS}; 2 of its 3 sample answers are the same as before.",
    ),
    (
        [*FALLS, *evals(loss=(0.69, 0.1), accuracy=(0.5, 1.0), margin=(0.0, 8.4)), END],  # 0.5 is not 0
        LEARNT + "held-out loss 0.690 → 0.100, accuracy 0.50 → 1.00, margin 0.00 → 8.40.",
    ),
    (
        train(3, 2),
        (
            "tiny-k2 was trained on 1,219 answers of yoda.jsonl; unfinished after step 2 of 3 and 1 min 30 s of training: loss"
            " 3.000 → 2.000."
        ),
    ),
    (
        [*train(3, 2), {**END, "step": 2, "reason": "interrupted"}],
        (
            "tiny-k2 was trained on 1,219 answers of yoda.jsonl; interrupted after step 2 of 3 and 1 min 30 s of training: loss"
            " 3.000 → 2.000."
        ),
    ),
    ([], "tiny-k2 has made no training step."),
]


def made(folder: Path, events: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if config is not None:
        (folder / "resolved_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "tokens, said",
    [
        (
            40,
            "tiny-k2 saw about 390 of 1,219 answers of yoda.jsonl once in 1 min 30 s of training: training loss",
        ),
        (125, "tiny-k2 learnt 1,219 answers of"),
        (1000, "tiny-k2 learnt 1,219 answers of"),
    ],
)
def test_a_run_within_its_first_epoch_says_how_much_it_saw(tokens, said, tmp_path):
    steps = [*[step | {"tokens": tokens} for step in FEW], *answers(("a", "b"))]
    run = made(tmp_path, [START, DATA | {"tokens": 1000}, RECEIPT, *steps, END])
    assert said in verdict(read_run(run))


@pytest.mark.parametrize(
    "config, said",
    [
        # batches of labelled answers take twice their tokens: 800 of 2,000 are no whole epoch
        (
            {"recipe": "prefer", "loss": "kto"},
            "tiny-k2 saw about 488 of 1,219 labelled answers of yoda.jsonl once in",
        ),
        ({"data_weights": [2.0, 0.25]}, "tiny-k2 saw 800 tokens, mixed from 1,219 answers of yoda.jsonl, in"),
    ],
)
def test_rows_that_come_more_than_once_are_not_counted_as_once(config, said, tmp_path):
    scale = 1 if "loss" in config else 2
    steps = [*[step | {"tokens": 100} for step in FEW], *answers(("a", "b"))]
    data = DATA | {"tokens": 1000 * scale, "shapes": {"question/answer": 1219}}
    assert said in verdict(read_run(made(tmp_path, [START, data, RECEIPT, *steps, END], config)))


@pytest.mark.parametrize("events, words", SAID)
def test_the_sentence(tmp_path: Path, events: list[dict[str, Any]], words: str):
    assert verdict(read_run(made(tmp_path, [START, DATA, RECEIPT, *events]))) == words


def test_rows_with_a_label_are_answers(tmp_path: Path):
    shapes = {"prompt/completion/label": 600, "messages/label": 619}
    run = made(tmp_path, [START, DATA | {"shapes": shapes}, RECEIPT, *FALLS, END])
    assert " 1,219 answers of " in verdict(read_run(run))


def test_what_it_learnt_is_named_as_far_as_it_is_known(tmp_path: Path):
    def said(events: list[dict[str, Any]], config: dict[str, Any]) -> str:
        return verdict(read_run(made(tmp_path, [*events, RECEIPT, *FALLS, END], config)))

    mixed = {**DATA, "shapes": {"question/answer": 1, "text": 2}}
    assert said([mixed], {"model": "org/m", "data": ["a", "b"]}).startswith(
        "m learnt 1,219 documents of 2 files in"
    )
    assert said([], {"data": "x/chat.jsonl"}).startswith(
        "The model learnt chat.jsonl in 1 min 30 s of training"
    )
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
    assert row[:2] == ("held-out loss", "mean over pairs, or over labelled answers")


def test_evaluations_have_units_and_steps(tmp_path: Path):
    events = [
        {"kind": "eval", "step": step, "loss": loss, "mine": 1.0}
        for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5))
    ]
    assert evaluation_rows(read_run(made(tmp_path, events))) == [
        ("held-out loss", "nats per token", "2", "1.5", "1 (step 2)"),
        ("mine", "", "1", "1", "–"),
    ]


def test_evaluations_leave_out_what_they_were_of_and_say_it_once(tmp_path: Path):
    each = {"tokens": 1143, "rows": 38, "seconds": 0.9, "accuracy": 0.8}
    events = [{"kind": "eval", "step": step, **each} for step in (0, 50)]
    run = read_run(made(tmp_path, events))
    assert [row[0] for row in evaluation_rows(run)] == [UNITS["accuracy"][0]]
    assert evaluation_note(run) == "Steps 0 to 50, on 38 rows with 1,143 supervised tokens, 0.9 s each."
    assert evaluation_note(read_run(made(tmp_path, events[:1]))).startswith("Step 0, on 38 rows")
    assert evaluation_note(read_run(made(tmp_path, []))) == ""


def test_what_the_page_is_of_is_named_as_far_as_it_is_known(tmp_path: Path):
    assert subject(read_run(made(tmp_path, [START]))) == "tiny-k2 on yoda.jsonl"
    assert subject(read_run(made(tmp_path, [START], {"data": ["a", "b"]}))) == "tiny-k2 on 2 files"
    assert subject(read_run(made(tmp_path / "mine", []))) == "mine"
    for files, words in (({"a.txt": 3}, "a.txt"), ({"a.txt": 3, "b.txt": 1}, "2 files"), ({}, "*.txt")):
        data = {"kind": "data", "step": 0, "time": 1.0, "files": files}
        pattern = read_run(made(tmp_path / words, [START, data], {"data": "in/*.txt"}))
        assert subject(pattern) == f"tiny-k2 on {words}"


def test_paths_of_the_command_begin_where_one_stands(tmp_path: Path):
    config = {"recipe": "sft", "model": "/elsewhere/m", "data": [str(tmp_path / "my rows.jsonl")]}
    run = read_run(made(tmp_path / "r", train(1.0), config | {"out": str(tmp_path / "runs/r")}))
    assert f"--out {tmp_path}/runs/r-again" in rerun_command(run)
    assert (
        rerun_command(run, tmp_path)
        == "unfreeze sft --model /elsewhere/m --data 'my rows.jsonl' --out runs/r-again"
    )


def test_a_switch_is_repeated_without_a_value(tmp_path: Path):
    for value, words in ((True, " --lora.dora"), (False, "")):
        config = {"recipe": "sft", "model": "m", "lora.dora": value, "out": "r"}
        command = rerun_command(read_run(made(tmp_path / str(value), train(1.0), config)))
        assert command == f"unfreeze sft --model m{words} --out r-again"


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
            "--data.template-variables",
            "enable_thinking=false",
            "--optimizer.clip",
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
    command = rerun_command(read_run(tmp_path))
    assert command.startswith(f"unfreeze {recipe} --model") and command.endswith(f"--out {tmp_path}-again")
    assert not recorded or len(shlex.split(command)) == len(flags) + 4  # nothing but what was typed
    back = parse(config, shlex.split(command)[2:], command=recipe, description="")
    own = {"out", *(() if recorded else ("data.template_date",))}
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
    assert given(config) == ["model", "data.files", "out"]


def test_the_loss_of_four_steps_is_named_as_a_mean_and_the_summarys_as_two_steps(tmp_path: Path):
    """One can rise where the other falls. Control arm: two steps of eight are a quarter."""
    run = read_run(
        made(tmp_path / "4", [START, DATA, *train(2.9, 2.3, 3.2, 2.1), END | {"reason": "interrupted"}])
    )
    assert "training loss 2.600 → 2.650 (mean of the first and the last 2 steps; no rows" in verdict(run)
    assert dict(facts(run))["Loss"] == "2.900 → 2.100; first and last step"
    run = read_run(made(tmp_path / "8", [START, DATA, *FEW, END]))
    assert QUARTERS in verdict(run)


def test_without_a_config_there_is_no_command(tmp_path: Path):
    run = read_run(made(tmp_path, train(1.0)))
    assert rerun_command(run) == "" and machine_rows(run) == []


@pytest.mark.parametrize("fraction, trained", [(0.1, "1,097"), (0.0, "1,219")])
def test_rows_that_were_held_out_are_not_learnt(fraction, trained, tmp_path):
    events = [START, DATA | {"held_out": 122}, RECEIPT, *FALLS, END]
    run = made(tmp_path, events, {"data": "yoda.jsonl", "validation_fraction": fraction})
    assert f"learnt {trained} answers of yoda.jsonl" in verdict(read_run(run))


@pytest.mark.parametrize("steps, learnt", [(8, False), (9, True)])
def test_of_too_few_steps_no_run_learns_and_the_remedy_is_said(steps, learnt, tmp_path):
    """Control arm: the warning is of a start with fewer steps than the run made, after --save.allow-changed."""
    few = "few steps: 8 of 4,096 tokens; each row is seen 3 times: --epochs 40"
    warned = {"kind": "warning", "step": 0, "message": few}
    losses, end = [*[3] * 2, *[2] * (steps - 4), *[1] * 2], {**END, "step": steps}
    seen = [*train(*losses), *answers(("a", "b"))]
    said = verdict(read_run(made(tmp_path / "r", [START, DATA, RECEIPT, warned, *seen, end])))
    assert said.endswith("held out)." if learnt else "held out). Too few steps to learn much: --epochs 40.")
    assert ("was trained on" in said) != learnt and ("learnt" in said) == learnt


TEACHES_LITTLE = {"kind": "warning", "step": 0, "message": "few steps: 3 of 4,096 tokens: --epochs 40"}
RISES = [*[2] * 10, *[2.2] * 30]


@pytest.mark.parametrize(
    "losses, fields, remedy",
    [
        (
            (2.705, 5.1, 8.584),
            {"optimizer.learning_rate": 2},
            "2 may be too high. Try --learning-rate 0.0002.",
        ),
        (RISES, {"optimizer.learning_rate": 1e-4}, "0.0001 may be too high. Try --learning-rate 1e-05."),
        (RISES, {"optimizer.learning_rate": 1e-8}, " The training loss rose by 0.200."),
        (RISES, {"recipe": "pretrain", "optimizer.learning_rate": 1}, "Try --learning-rate 0.003."),
        (RISES, {"train": "all", "optimizer.learning_rate": 1}, f"Try --learning-rate {ALL_RATE:g}."),
        (RISES, {}, "Lower --learning-rate."),
    ],
)
@pytest.mark.parametrize("reason", ["done", "interrupted"])
def test_a_rate_that_ruins_a_run_is_named_and_not_the_epochs(losses, fields, remedy, reason, tmp_path):
    end = {**END, "step": len(losses), "reason": reason}
    events = [START, DATA, RECEIPT, TEACHES_LITTLE, *train(*losses), end]
    said = verdict(read_run(made(tmp_path, events, {"recipe": "sft", **fields})))
    assert " The training loss rose by " in said and said.endswith(remedy)
    assert "was trained on" in said and "epochs" not in said


@pytest.mark.parametrize(
    "events",
    [
        train(2, 2.1, 2.15),  # less than a tenth, in three steps
        train(*[2, 3, 1, 2, 3] * 8, 3),  # within the spread
        [*train(0.1, 0.2, 0.3), {"kind": "rollout", "step": 1, "groups": 1}],  # a policy's loss
        [*train(2, 3, 4), *evals(loss=(3.0, 1.5))],  # the held-out loss fell
    ],
)
def test_control_arm_of_a_loss_that_did_not_clearly_rise_no_rate_is_named(events, tmp_path):
    config = {"recipe": "sft", "optimizer.learning_rate": 2}
    said = verdict(read_run(made(tmp_path, [START, DATA, RECEIPT, *events, END], config)))
    assert "rose" not in said


@pytest.mark.parametrize("rate", [1e-8, 2e-4])
def test_few_steps_at_a_usual_or_lower_rate_may_rise_by_the_order_of_the_rows(rate, tmp_path):
    events = [START, DATA, RECEIPT, TEACHES_LITTLE, *train(2, 3, 4), {**END, "step": 3}]
    said = verdict(read_run(made(tmp_path, events, {"recipe": "sft", "optimizer.learning_rate": rate})))
    assert "rose" not in said and said.endswith("Too few steps to learn much: --epochs 40.")


@pytest.mark.parametrize("change, proven", [(-1.5, True), (-0.001, False)])
def test_a_held_out_loss_that_fell_is_not_called_too_few_steps(change, proven, tmp_path):
    """Control arm: a change within its error, of which the warning is said as before."""
    few = "only 8 steps of 4,096 tokens (3 epochs of this data), too few to learn much: --epochs 40"  # before 0.2
    warned = {"kind": "warning", "step": 0, "message": few}
    measured = evals(loss=(3.0, 3.0 + change))
    events = [START, DATA, RECEIPT, warned, *train(3, 3, 2, 2, 2, 2, 1, 1), *measured, {**END, "step": 8}]
    said = verdict(read_run(made(tmp_path / "r", events)))
    assert ("learnt" in said) == proven and ("Too few steps" in said) != proven


def test_the_warning_that_the_verdict_knows_is_the_one_that_a_run_emits():
    from unfreeze.job.data import few_steps
    from unfreeze.report.events import FEW_STEPS

    def few(kind=sft.Config, epochs=3, **fields):
        fields = {"model": "tiny-k2", "data": {"files": ("chat.jsonl",)}, **fields}
        return kind.model_validate({**fields, "training": {"epochs": epochs}})

    words, remedy = few_steps(few(), 3, 1)
    assert words == f"{FEW_STEPS}3 of 4,096 tokens; each row is seen 3 times"
    assert remedy == "unfreeze init tiny-k2 chat.jsonl fits them to the data, or --epochs 40"
    assert len(f"{words}: {remedy}") <= 140
    # one step is 0.01 epochs as asked, but a third of one in truth
    words, remedy = few_steps(few(epochs=0.01), 1, 3)
    assert words.endswith("; 1% of the rows are seen once") and remedy.endswith(", or --epochs 14")
    two = {"files": ("a.jsonl", "b.jsonl")}
    assert few_steps(few(data=two), 3, 1)[1].startswith("unfreeze init MODEL DATA fits")
    # init writes files for adapters of sft; no number of tokens: an eighth gave nine steps of forty rows
    for other in (few(pretrain.Config), few(train="all", lora=None)):
        assert few_steps(other, 3, 1)[1] == "--epochs 40, or fewer --tokens-per-step"


def test_shares_that_a_reward_never_reaches_are_left_out(tmp_path: Path):
    """And the loss, which is minus the reward. Once an answer is solved, all shares stand there."""
    zeros = {name: 0.0 for name in ("solved", "pass_1", "pass_1_low", "pass_1_high")}
    event = {"kind": "eval", "time": 1.0, "loss": -0.5, "reward": 0.5, "rows": 9, **zeros}
    never = [event | {"step": 0}, event | {"step": 9, "reward": 0.75, "loss": -0.75}]
    run = read_run(made(tmp_path / "never", never))
    assert set(evaluations(run)) == {"reward", "rows"}
    assert "pass@1" not in eval_words(event) and "reward 0.5" in eval_words(event)
    once = [never[0], never[1] | {"solved": 0.5, "pass_1": 0.25}]
    run = read_run(made(tmp_path / "once", once))
    assert set(evaluations(run)) == {"reward", "rows", *zeros}
    assert evaluations(run)["solved"] == ([0, 9], [0.0, 0.5])


def test_the_rewards_of_one_prompt_have_no_interval():
    """However often the prompt stands in the file: one has no spread."""
    event = {"kind": "eval", "step": 0, "loss": -0.5, "reward": 0.5, "reward_low": None, "reward_high": None}
    event |= {
        "pass_1": 0.25,
        "pass_1_low": None,
        "pass_1_high": None,
        "solved": 0.25,
        "rows": 1,
        "tokens": 30,
    }
    assert eval_words(event) == "held-out reward 0.5, held-out pass@1 0.25, solved 0.25 (1 row, 30 tokens)"
    event |= {"reward_low": 0.4, "reward_high": 0.6, "rows": 40}
    words = "held-out reward 0.5 (0.4 to 0.6), held-out pass@1 0.25, solved 0.25 (40 rows, 30 tokens)"
    assert eval_words(event) == words
