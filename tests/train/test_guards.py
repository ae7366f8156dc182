"""Spikes of loss and gradient norm: warned of, skipped or stopped at before the update, with the rows written
out; silent on clean runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unfreeze.core.batch import Batch
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.balance import LossFreeBalance
from unfreeze.train.fit import fit
from unfreeze.train.guards import HISTORY, MAX_SKIPPED, WINDOW, Spike, SpikeGuard, threshold
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import State, start_or_resume
from unfreeze.train.suspects import SUSPECTS
from unfreeze.train.timer import Saves

BAD = 30  # the position of the batch whose targets are wrong
STEPS = 36


def with_a_bad_batch(
    tiny: SimpleNamespace, start: dict[str, Any] | None = None
) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
    """Learnable batches; in one the second document's targets are the least likely words."""
    for (batch,), cursor in tiny.endless(start):
        if cursor["position"] - 1 == BAD:
            targets = batch.targets_T.clone()
            targets[9:23] = (targets[9:23] + 11) % tiny.VOCAB
            batch = replace(batch, targets_T=targets)
        yield [batch], cursor


def train(
    tiny: SimpleNamespace, folder: Path, on_spike: str | None, *, steps: int = STEPS, until: int | None = None
) -> tuple[State, list[Any]]:
    seen: list[Any] = []

    def look(state: State, result: Any) -> None:
        seen.append(
            (
                result,
                {name: p.detach().clone() for name, p in state.model.named_parameters()},
                dict(balance.tensors()),
                balance.num_updates,
            )
        )

    with Run(folder, {}) as run:
        model = tiny.Model()
        balance = LossFreeBalance(model, 0.01)
        state = start_or_resume(
            run,
            model,
            optimizer=AdamW(model),
            schedule=Schedule(5e-2, steps, "constant"),
            after_update=[balance],
        )
        options: dict[str, Any] = {}
        if on_spike:
            history = [(e["loss"], e["grad_norm"]) for e in events(folder, "train")]
            options["judge"] = SpikeGuard(
                model,
                cross_entropy,
                folder,
                recompute=tiny.plain,
                on_spike=on_spike,
                step=state.step,
                history=history,
                describe=lambda tokens: {"row": len(tokens)},
            )  # type: ignore[arg-type]
        fit(
            state,
            with_a_bad_batch(tiny, state.cursor),
            cross_entropy,
            recompute=tiny.recompute,
            on_step=[look],
            saves=Saves(every=10, keep=99),
            **options,
        )
        return state, seen


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    return (
        [e for e in map(json.loads, path.read_text().splitlines()) if e["kind"] == kind]
        if path.exists()
        else []
    )


def moved(seen: list[Any], step: int) -> bool:
    before, after = seen[step - 2][1], seen[step - 1][1]
    return any(not torch.equal(before[name], after[name]) for name in before)


def test_warn_says_so_names_the_rows_and_trains_on(tiny: SimpleNamespace, tmp_path: Path):
    _, seen = train(tiny, tmp_path, "warn")
    warned = [event for event in events(tmp_path, "train") if event.get("warning")]
    assert (
        [event["step"] for event in warned] == [BAD + 1]
        and warned[0]["applied"] is True
        and moved(seen, BAD + 1)
    )
    assert (
        warned[0]["warning"].startswith("loss ")
        and "is above" in warned[0]["warning"]
        and SUSPECTS in warned[0]["warning"]
    )
    lines = [json.loads(line) for line in (tmp_path / SUSPECTS).read_text().splitlines()]
    # the worst first
    assert next((line["step"], line["document"], line["row"], line["of"]) for line in lines) == (
        BAD + 1,
        2,
        14,
        3,
    )
    assert lines[0]["loss"] > 3 * lines[1]["loss"] and lines[0]["supervised"] == 6
    (batch,), _ = next(with_a_bad_batch(tiny, {"position": BAD}))
    assert lines[0]["tokens"] == batch.tokens_T[9:23].tolist()


def test_skip_moves_nothing_and_says_so(tiny: SimpleNamespace, tmp_path: Path):
    state, seen = train(tiny, tmp_path, "skip")
    event = events(tmp_path, "train")[BAD]
    assert (
        event["applied"] is False
        and "the update was skipped" in event["warning"]
        and event["learning_rate"] == 0.0
    )
    assert not moved(seen, BAD + 1) and moved(seen, BAD) and moved(seen, BAD + 2)
    assert seen[-1][3] == STEPS - 1  # the balancing bias acted once per update
    assert {
        float(state.optimizer.tensors()[name])
        for name in state.optimizer.tensors()
        if name.startswith("step.")
    } == {STEPS - 1}
    assert sum(event["expert_load"]["0"]) == 28  # looking at the rows again counted nothing
    assert all(e["learning_rate"] == 5e-2 for e in events(tmp_path, "train") if e["step"] != BAD + 1)


def test_stop_raises_before_the_update_with_the_next_command(tiny: SimpleNamespace, tmp_path: Path):
    with pytest.raises(
        Spike,
        match=(
            rf"step {BAD + 1}: loss .* is above .*; the weights were not updated, its rows are in"
            r" suspects.jsonl"
        ),
    ) as caught:
        train(tiny, tmp_path, "stop")
    assert "--watch.on-spike skip" in caught.value.next and (tmp_path / SUSPECTS).is_file()


def test_control_arm_without_the_guard_the_step_passes_unsaid(tiny: SimpleNamespace, tmp_path: Path):
    _, seen = train(tiny, tmp_path, None)
    assert (
        moved(seen, BAD + 1)
        and not any(e.get("warning") for e in events(tmp_path, "train"))
        and not (tmp_path / SUSPECTS).exists()
    )
    losses = [e["loss"] for e in events(tmp_path, "train")]
    assert losses[BAD] > 5 * losses[BAD - 1]  # though it stands out


def test_a_resumed_run_judges_as_the_unbroken_one(tiny: SimpleNamespace, tmp_path: Path):
    """Window and step count come back from the events: the same step is skipped, the same bits come out."""
    straight, _ = train(tiny, tmp_path / "straight", "skip")
    with pytest.raises(Spike):
        train(tiny, tmp_path / "broken", "stop")  # dies at step 31, saved at 30
    broken, _ = train(tiny, tmp_path / "broken", "skip")
    assert [e["step"] for e in events(tmp_path / "broken", "train") if e.get("warning")] == [BAD + 1]
    for name, tensor in straight.tensors().items():
        assert torch.equal(broken.tensors()[name], tensor), name


def test_the_threshold_is_robust_to_outliers_and_follows_its_formula():
    values = [1.0, 1.1, 0.9, 1.2, 0.8]  # median 1, differences .1, .2, .3, .4
    assert threshold(values, 0.0) == pytest.approx(1 + 8 * 1.0483 * 0.25)
    falling = [4 - 0.1 * i for i in range(40)]
    # the trend itself is no noise
    assert threshold(falling, 0.0) == pytest.approx(falling[-16:][8] + 0.05 + 8 * 1.0483 * 0.1)
    assert threshold([*values[:-1], 1e9], 0.0) < 3.5 and threshold(values, 0.5) == pytest.approx(5.0)


def judge(
    tiny: SimpleNamespace, tmp_path: Path, values: list[tuple[float, float]], **options: Any
) -> list[str]:
    guard = SpikeGuard(
        tiny.Model(),
        cross_entropy,
        tmp_path,
        recompute=tiny.plain,
        on_spike=options.pop("on_spike", "warn"),
        **options,
    )
    batch = tiny.make_batch([5], [5], 0)
    return [guard([batch], loss, norm).warning for loss, norm in values]


def test_no_alarm_on_noise_a_falling_loss_an_overfitted_one_or_a_short_history(
    tiny: SimpleNamespace, tmp_path: Path
):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1000, 2, generator=generator)
    falling = [
        (3 * math.exp(-i / 80) + 0.3 + 0.15 * a, math.exp(0.5 * b)) for i, (a, b) in enumerate(noise.tolist())
    ]
    overfitted = [(0.01 + 0.03 * abs(a), 0.05 * math.exp(b)) for a, b in noise.tolist()]
    assert not any(judge(tiny, tmp_path, falling)) and not any(
        judge(tiny, tmp_path, overfitted, max_norm=1.0)
    )
    assert not any(judge(tiny, tmp_path, [(1.0, 1.0)] * (HISTORY - 1) + [(99.0, 99.0)]))
    assert [bool(w) for w in judge(tiny, tmp_path, [(1.0, 1.0)] * HISTORY + [(1.9, 1.0), (1.7, 1.0)])][
        -2:
    ] == [True, False]


def test_a_gradient_norm_alarms_above_nine_medians_and_the_clip_limit(tiny: SimpleNamespace, tmp_path: Path):
    calm = [(1.0, 0.1)] * HISTORY
    assert (
        "gradient norm 1 is above 0.9025, the level was 0.1" in judge(tiny, tmp_path, [*calm, (1.0, 1.0)])[-1]
    )
    assert judge(tiny, tmp_path, [*calm, (1.0, 0.8)])[-1] == ""
    assert (
        judge(tiny, tmp_path, [*calm, (1.0, 1.0)], max_norm=1.0)[-1] == ""
        and judge(tiny, tmp_path, [*calm, (1.0, 1.1)], max_norm=1.0)[-1]
    )


def test_a_level_that_rose_for_good_stops_alarming_and_endless_skipping_stops(
    tiny: SimpleNamespace, tmp_path: Path
):
    said = judge(tiny, tmp_path, [(1.0, 1.0)] * WINDOW + [(9.0, 1.0)] * WINDOW)
    assert said[WINDOW] and not said[-1]
    with pytest.raises(Spike, match=f"the {MAX_SKIPPED} steps before it were skipped for the same"):
        judge(tiny, tmp_path, [(1.0, 1.0)] * WINDOW + [(9.0, 1.0)] * WINDOW, on_spike="skip")
