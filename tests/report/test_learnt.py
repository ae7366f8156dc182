"""What a run proves. Of noise, a rate of nothing, an overfitted run and one that has begun to ramble none is
"learnt"; the same events with a fall beyond its error are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unfreeze.report.events import AT_LEAST, LEAKED
from unfreeze.report.learnt import Evidence, errors, finding, moved, training
from unfreeze.report.run import RunFolder, read_run

GROUP = {"parameters": 9, "trained": 9, "moved": 0.1, "output_change": 0.05, "rounding": 1e-6}
FALLING = np.linspace(5, 3, 80)


def steps(losses: Any, rate: float = 1e-3, **beside: Any) -> list[dict[str, Any]]:
    return [
        {"kind": "train", "step": i, "loss": float(loss), "seconds": 1.0, "learning_rate": rate}
        | {name: float(values[i - 1]) for name, values in beside.items()}
        for i, loss in enumerate(losses, start=1)
    ]


def receipt(**group: Any) -> dict[str, Any]:
    return {"kind": "receipt", "step": 1, "groups": {"mlp": {**GROUP, **group}}}


def evaluated(
    *points: dict[str, float], rows: int = 40, **changes: tuple[float, float | None]
) -> list[dict[str, Any]]:
    """An eval event per point. changes: measure, or measure_step, -> (change, error) in the last of them."""
    events: list[dict[str, Any]] = [
        {"kind": "eval", "step": 40 * i, "rows": rows, **point} for i, point in enumerate(points)
    ]
    made = []
    for name, (change, error) in changes.items():
        measure, _, since = name.partition("_at_")
        made.append({"measure": measure, "since": int(since or 0), "change": change, "error": error})
    events[-1]["changes"] = made
    return events


def found(folder: Path, events: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Evidence:
    return finding(run_of(folder, events, config))


def run_of(folder: Path, events: list[dict[str, Any]], config: dict[str, Any] | None = None) -> RunFolder:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "resolved_config.json").write_text(json.dumps(config or {}))
    return read_run(folder)


# --- how many standard errors


@pytest.mark.parametrize("degrees", [2, 3, 5, 10, 37, 200])
def test_as_improbable_as_two_errors_of_a_normal(degrees):
    """Against Student's density summed numerically: the tail beyond errors(degrees) is that of 2 sigma."""
    t = np.linspace(errors(degrees), 4000, 4_000_001)
    density = np.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    tail = np.trapezoid(density * (1 + t * t / degrees) ** (-(degrees + 1) / 2), t)
    normal = 0.5 * math.erfc(2 / math.sqrt(2))
    assert tail == pytest.approx(normal, rel=0.03)
    assert errors(1) == math.inf  # two rows prove nothing


# --- held-out rows


@pytest.mark.parametrize(
    "change, error, rows, learnt",
    [
        (-0.20, 0.05, 40, True),
        (-0.20, 0.12, 40, False),  # within two errors
        (+0.20, 0.05, 40, False),
        (-0.02, 1e-4, 40, False),  # clear, and less than a hundredth of 5
        (-0.20, 0.05, 3, False),  # of three rows the error is badly known: 4.5 of them
        (-0.20, None, 1, False),
    ],
)
def test_held_out_loss_falls_by_more_than_its_error_and_a_hundredth(change, error, rows, learnt, tmp_path):
    points = evaluated({"loss": 5.0}, {"loss": 5.0 + change}, rows=rows, loss=(change, error))
    judged = found(tmp_path, [receipt(), *steps(FALLING), *points])
    assert judged.learnt == learnt
    assert (judged.note == " 1 row was held out: too few to tell.") == (rows == 1)


NOISE = {"loss": 0.693, "accuracy": 0.5, "margin": 0.0}


@pytest.mark.parametrize(
    "end, changes, learnt",
    [
        # random preferences: loss risen, accuracy within its error; margin alone grew
        (
            {"loss": 0.896, "accuracy": 0.53, "margin": 0.21},
            {"loss": (0.2, 0.15), "accuracy": (0.03, 0.08)},
            False,
        ),
        # one of the two is not enough, either way
        (
            {"loss": 0.5, "accuracy": 0.53, "margin": 0.2},
            {"loss": (-0.193, 0.03), "accuracy": (0.03, 0.08)},
            False,
        ),
        (
            {"loss": 0.7, "accuracy": 0.9, "margin": 0.2},
            {"loss": (0.007, 0.1), "accuracy": (0.4, 0.05)},
            False,
        ),
        (
            {"loss": 0.1, "accuracy": 1.0, "margin": 8.4},
            {"loss": (-0.593, 0.02), "accuracy": (0.5, 0.0)},
            True,
        ),
    ],
)
def test_preferences_need_the_loss_and_accuracy(end, changes, learnt, tmp_path):
    judged = found(tmp_path, [receipt(), *steps(FALLING), *evaluated(NOISE, end, **changes)])
    assert judged.learnt == learnt and judged.measured.startswith("held-out loss 0.693 → ")
    assert "accuracy 0.50 → " in judged.measured


@pytest.mark.parametrize("began, ended, learnt", [(0.9, 0.9, True), (0.9, 0.8, False), (0.4, 0.4, False)])
def test_without_a_reference_accuracy_may_begin_high(began, ended, learnt, tmp_path):
    points = [{"loss": 2.0, "accuracy": began}, {"loss": 1.0, "accuracy": ended}]
    judged = evaluated(*points, loss=(-1.0, 0.1), accuracy=(ended - began, 0.04))
    assert found(tmp_path, [receipt(), *steps(FALLING), *judged]).learnt == learnt


def test_a_rise_after_the_lowest_point_is_overfitting_and_names_the_step_to_take(tmp_path):
    points = ({"loss": 10.9}, {"loss": 4.1}, {"loss": 4.9})
    whole = [receipt(), *steps(FALLING)]
    rise = evaluated(*points, loss=(-6.0, 0.1), loss_at_40=(0.8, 0.1))
    judged = found(tmp_path, [*whole, *rise])
    assert not judged.learnt
    assert judged.note == (
        " Overfitted: held-out loss rose since its lowest point (step 40, 4.100). Stop earlier: --watch.early-stop 2."
    )
    (tmp_path / "adapter-best").mkdir()
    assert found(tmp_path, [*whole, *rise]).note.endswith("Use adapter-best/, which is step 40.")
    # control arms: a rise within its error, and one below a hundredth of the loss at step 0
    for change, error in ((0.8, 0.5), (0.1, 0.001)):
        slight = evaluated(*points, loss=(-6.0, 0.1), loss_at_40=(change, error))
        assert found(tmp_path, [*whole, *slight]) == Evidence(True, judged.measured)


# the means of docs/measured/prefer.md: dpo alone, whose chosen answer becomes likely and is still not said; dpo with nll
RAMBLES, SPEAKS = (-1.0, -9.7), (-1.0, -0.5)


@pytest.mark.parametrize("likelier, learnt", [(RAMBLES, False), (SPEAKS, True), ((-1.0, -1.6), True)])
def test_where_both_answers_become_less_likely_it_has_begun_to_ramble(likelier, learnt, tmp_path):
    points = [{"loss": 0.69, "accuracy": 0.5, "logp_likelier": likelier[0]}]
    points += [{"loss": 0.001, "accuracy": 1.0, "logp_likelier": likelier[1]}]
    changes = {
        "loss": (-0.69, 0.01),
        "accuracy": (0.5, 0.0),
        "logp_likelier": (likelier[1] - likelier[0], 0.2),
    }
    judged = found(tmp_path, [receipt(), *steps(FALLING), *evaluated(*points, **changes)])
    assert judged.learnt == learnt
    said = "Both answers became less likely (the likelier of a pair -1.0 → -9.7 nats)"
    assert (said in judged.note) == (not learnt) and ("--preference.nll 1" in judged.note) == (not learnt)


@pytest.mark.parametrize(
    "chosen, rejected, said", [((-82, -12.8), (-1, -9.7), True), ((-82, -0.5), (-1, -9.7), False)]
)
def test_it_is_seen_in_training_where_nothing_is_held_out(chosen, rejected, said, tmp_path):
    course = 1 - np.exp(-np.linspace(0, 12, 80))  # soon there, as a run is
    sides = {
        f"logp_{name}": begun + (ended - begun) * course
        for name, (begun, ended) in (("chosen", chosen), ("rejected", rejected))
    }
    judged = found(tmp_path, [receipt(), *steps(FALLING, margin=FALLING, **sides)])
    assert not judged.learnt and ("Both answers became less likely" in judged.note) == said
    assert ("No pairs were held out" in judged.note) != said


def test_pairs_of_which_none_is_held_out_may_be_known_by_heart(tmp_path):
    """Loss and output of random preferences fall and move like those of others."""
    judged = found(tmp_path / "pairs", [receipt(), *steps(FALLING, margin=FALLING)])
    assert not judged.learnt and "No pairs were held out" in judged.note
    assert found(tmp_path / "rows", [receipt(), *steps(FALLING)]).learnt


def test_a_held_out_loss_that_is_no_number_is_none_of_success(tmp_path):
    points = evaluated({"loss": 5.0}, {"loss": None})
    judged = found(tmp_path, [receipt(), *steps(FALLING), *points])
    assert not judged.learnt and "no longer finite" in judged.note


@pytest.mark.parametrize(
    "losses, learnt", [((5.0, 4.0), True), ((5.0, 4.97), False), ((5.0, 3.0, 4.0), False)]
)
def test_an_earlier_versions_folder_has_no_errors_and_needs_the_training_loss_too(losses, learnt, tmp_path):
    points = [{"kind": "eval", "step": 40 * i, "loss": loss} for i, loss in enumerate(losses)]
    assert found(tmp_path, [receipt(), *steps(FALLING), *points]).learnt == learnt
    assert not found(tmp_path, [receipt(), *steps(FALLING[::-1]), *points]).learnt


@pytest.mark.parametrize(
    "leaked, learnt",
    [
        ("6 of 20 {}", False),  # of an earlier version, which measured them
        ("1 of 20 {}", True),
        (f"{AT_LEAST}1 of 20 {{}}", False),  # how many there are is not known
        ("6 of 20 {}, so they are left out of validation", True),
    ],
)
def test_held_out_rows_that_were_trained_on_prove_nothing(leaked, learnt, tmp_path):
    warned = {"kind": "warning", "step": 0, "message": leaked.format(LEAKED)}
    points = evaluated({"loss": 5.0}, {"loss": 4.0}, loss=(-1.0, 0.05))
    judged = found(tmp_path, [warned, receipt(), *steps(FALLING), *points])
    assert judged.learnt == learnt and ("of 20 validation documents" in judged.note) == (not learnt)


# --- scores of a probe


@pytest.mark.parametrize(
    "style, facts, learnt",
    [
        ((98.0, 1.3), (-0.9, 0.9), True),
        ((98.0, 1.3), (-30.0, 4.0), False),  # one good score of two
        ((2.0, 1.4), (0.0, 0.0), False),
        (None, None, True),  # a probe of one's own says no error: the training loss decides
    ],
)
def test_scores_need_one_beyond_its_error_and_none_worse(style, facts, learnt, tmp_path):
    changes = {"style": style, "facts": facts} if style and facts else {}
    points = evaluated({"style": 0.0, "facts": 100.0}, {"style": 50.0, "facts": 99.0}, **changes)
    assert found(tmp_path, [receipt(), *steps(FALLING), *points]).learnt == learnt
    assert not found(tmp_path, [receipt(), *steps(FALLING[::-1]), *points]).learnt


# --- training alone


def test_noise_learns_nothing_and_a_fall_does(tmp_path):
    """Losses of other rows in each step: of 200 runs that learn nothing about 2.3 % pass the bound of two errors."""
    draw = np.random.default_rng(0)
    passed = {0.0: 0, 0.8: 0}
    for fall in passed:
        for _ in range(200):
            losses = 5.4 + 0.3 * draw.normal(size=40) - fall * np.linspace(0, 1, 40)
            judged = training(run_of(tmp_path, steps(losses)))
            passed[fall] += bool(judged and judged.clear)
    assert passed[0.0] <= 10 and passed[0.8] >= 190
    # control arm: one step against another, as it was before, says so of every other run
    assert sum(draw.normal() > draw.normal() for _ in range(200)) > 80


def test_whole_epochs_are_compared_where_each_ends_with_a_step(tmp_path):
    rows = np.array([9.0, 1.0, 9.0, 1.0])  # the spread of rows hides a fall of 5 % in quarters, not in epochs
    losses = np.concatenate([rows, 0.97 * rows[::-1], 0.95 * rows])
    data = {"kind": "data", "step": 0, "tokens": 400, "examples": 4}
    whole = training(run_of(tmp_path, [data, *[s | {"tokens": 100} for s in steps(losses)]]))
    assert whole and (whole.before, whole.after) == (5.0, pytest.approx(4.75))
    assert whole.of == "mean of the first and the last epoch"
    cut = training(run_of(tmp_path, [data, *[s | {"tokens": 90} for s in steps(losses)]]))
    assert cut and cut.of == "mean of the first and the last quarter"


def test_epochs_weigh_tokens_as_the_loss_does(tmp_path):
    data = {"kind": "data", "step": 0, "tokens": 200, "examples": 4}
    each = [
        s | {"tokens": 100, "supervised_tokens": n}
        for s, n in zip(steps([4, 2, 3, 1]), (30, 10, 30, 10), strict=True)
    ]
    judged = training(run_of(tmp_path, [data, *each]))
    assert judged and (judged.before, judged.after) == (3.5, 2.5)


@pytest.mark.parametrize(
    "rate, group, answers, learnt",
    [
        (1e-3, {"output_change": 0.05}, None, True),
        (1e-8, {"output_change": 1e-5}, None, False),  # 80 steps of that move no logit by a thousandth
        (1e-3, {"moved": 0.0}, None, False),
        (1e-3, {"output_change": 1e-7}, None, False),  # rounding: it cannot be told
        (1e-3, {"output_change": 1e-7}, ("a", "b"), True),  # but that its answers differ can
        (1e-3, {"output_change": None}, None, True),  # not measured
    ],
)
def test_the_output_must_have_moved_far_enough(rate, group, answers, learnt, tmp_path):
    said = [
        {"kind": "sample", "step": 0, "when": when, "index": 0, "prompt": "?", "text": text}
        for when, text in zip(("before", "after"), answers or (), strict=False)
    ]
    run = run_of(tmp_path, [receipt(**group), *steps(FALLING, rate), *said])
    assert moved(run, training(run)) == finding(run).learnt == learnt


def test_a_first_step_of_warm_up_moves_little_and_the_others_more(tmp_path):
    """Rates from 1e-6 to 1e-3: the first step's change says how far all of them reach."""
    warm = [s | {"learning_rate": min(1e-3, 1e-6 * 2**i)} for i, s in enumerate(steps(FALLING))]
    run = run_of(tmp_path, [receipt(output_change=5e-5), *warm])
    assert moved(run, training(run))
    assert not moved(run_of(tmp_path, [receipt(output_change=5e-5), *steps(FALLING, 1e-6)]), training(run))


@pytest.mark.parametrize(
    "before, after, arrow",
    [
        ({"fingerprint": "a"}, {"fingerprint": "b"}, False),
        ({"tokens": 90}, {"tokens": 80}, False),  # an earlier version's: other counts
        ({}, {"fingerprint": "b"}, True),  # begun by one, gone on with by this one
        ({"fingerprint": "b"}, {"fingerprint": "b"}, True),
    ],
)
def test_losses_of_other_rows_are_no_fall(before, after, arrow, tmp_path):
    first, *later = evaluated({"loss": 6.2, **before}, {"loss": 0.1, **after}, loss=(-6.1, 0.05))
    judged = found(tmp_path, [receipt(), *steps(FALLING), first, *later])
    assert ("→" in judged.measured) == judged.learnt == arrow
    # on the new rows alone it can be learnt again, from the step at which they were first measured
    anew = [{**later[0], "step": 20, "loss": 0.2, "changes": []}, later[0]]
    anew[1]["changes"] = [{"measure": "loss", "since": 20, "change": -0.1, "error": 0.001}]
    judged = found(tmp_path, [receipt(), *steps(FALLING), first, *anew])
    if not arrow:
        assert judged.learnt and judged.measured == "held-out loss 0.200 → 0.100 (since step 20)"
