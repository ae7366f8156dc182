"""The loop: what its events say, how it stops (done, Ctrl-C, NaN, end of data), that hooks get what they were
promised."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unfreeze.core.errors import DataError
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.fit import Fitted, fit
from unfreeze.train.optim import AdamW, NonFinite
from unfreeze.train.run import Run, latest
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import State, start_or_resume
from unfreeze.train.timer import Saves


def read_events(folder: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == kind]


def train(
    tiny: SimpleNamespace,
    folder: Path,
    *,
    steps: int = 6,
    batches: Iterator | None = None,
    micro_batches: int = 1,
    **options: Any,
) -> tuple[Fitted, State]:
    with Run(folder, {"model": "tiny", "data": "d.jsonl"}) as run:
        model = tiny.Model()
        state = start_or_resume(
            run, model, optimizer=AdamW(model), schedule=Schedule(3e-2, steps, "cosine", 2)
        )
        source = tiny.endless(state.cursor, micro_batches) if batches is None else batches
        return fit(state, source, cross_entropy, recompute=tiny.recompute, **options), state


def test_it_learns_and_each_step_leaves_one_event(tiny: SimpleNamespace, tmp_path: Path):
    fitted, state = train(tiny, tmp_path, steps=60, micro_batches=2)
    events = read_events(tmp_path, "train")
    assert [e["step"] for e in events] == list(range(1, 61))
    assert fitted.reason == "done" and fitted.steps == state.step == 60
    assert fitted.loss_first == events[0]["loss"] and fitted.loss_last == events[-1]["loss"]
    assert events[-1]["loss"] < 0.3 * events[0]["loss"] and events[-1]["correct"] > 0.8
    for event in events:
        assert (event["tokens"], event["supervised_tokens"]) == (56, 28)
        # read back from the optimizer
        assert event["learning_rate"] == state.schedule.learning_rate(event["step"] - 1)
        assert (
            event["seconds"] > 0
            and event["grad_norm"] > 0
            and isinstance(event["peak_bytes"], int)
            and event["peak_bytes"] > 2**20
        )
        assert {layer: sum(load) for layer, load in event["expert_load"].items()} == {"0": 56, "1": 56}
    (start,), (end,) = read_events(tmp_path, "start"), read_events(tmp_path, "end")
    assert (start["step"], start["steps"], start["resumed"], start["model"], start["data"]) == (
        0,
        60,
        False,
        "tiny",
        "d.jsonl",
    )
    assert (end["reason"], end["steps"]) == ("done", 60)
    assert end["tokens_per_second"] == pytest.approx(60 * 56 / sum(e["seconds"] for e in events))
    assert [e["path"] for e in read_events(tmp_path, "save")] == ["state/step-000060"]


def test_hooks_run_in_order_and_see_gradients_of_the_step(tiny: SimpleNamespace, tmp_path: Path):
    seen: list[tuple[str, int]] = []

    def first(state: State, result: Any) -> None:
        norm = math.sqrt(
            sum(state.optimizer.gradient(n).square().sum().item() for n in state.optimizer.parameters)
        )  # type: ignore[union-attr]
        # as they came, not clipped
        assert norm == pytest.approx(result.grad_norm, rel=1e-5) and result.clip_scale < 1
        seen.append(("first", state.step))

    train(
        tiny,
        tmp_path,
        steps=3,
        max_norm=0.1,
        on_step=[first, lambda state, _: seen.append(("second", state.step))],
    )
    assert seen == [(name, step) for step in (1, 2, 3) for name in ("first", "second")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_says_so(
    tiny: SimpleNamespace, tmp_path: Path, number: signal.Signals
):
    def interrupt(state: State, result: Any) -> None:
        if state.step == 2:
            os.kill(os.getpid(), number)

    former = signal.getsignal(number)
    fitted, _ = train(tiny, tmp_path, on_step=[interrupt])
    assert (fitted.reason, fitted.steps) == ("interrupted", 2)
    assert signal.getsignal(number) is former
    assert latest(tmp_path) == tmp_path / "state" / "step-000002"
    assert [(e["step"], e["reason"]) for e in read_events(tmp_path, "end")] == [(2, "interrupted")]
    again, _ = train(tiny, tmp_path)
    assert (again.reason, again.steps) == ("done", 6)
    assert [e["step"] for e in read_events(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]
    assert [e["reason"] for e in read_events(tmp_path, "end")] == ["done"]


def test_a_second_ctrl_c_raises_at_once(tiny: SimpleNamespace, tmp_path: Path):
    # a shell starts what runs in the background with the signal ignored, and so it would stay
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def twice(state: State, result: Any) -> None:
        signal.raise_signal(signal.SIGINT)  # its handler runs before this returns
        signal.raise_signal(signal.SIGINT)  # its handler runs before this returns

    try:
        with pytest.raises(KeyboardInterrupt):
            train(tiny, tmp_path, on_step=[twice])
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_nan_stops_the_run_and_the_save_before_stays(tiny: SimpleNamespace, tmp_path: Path):
    def poison(state: State, result: Any) -> None:
        if state.step == 4:
            with torch.no_grad():
                state.model.lm_head.bias.fill_(math.nan)  # type: ignore[union-attr]

    with pytest.raises(
        NonFinite, match=r"step 5: the loss is nan .* were not updated; the last save is .*step-000003"
    ) as caught:
        train(tiny, tmp_path, saves=Saves(every=3), on_step=[poison])
    assert "learning_rate" in caught.value.next
    event = read_events(tmp_path, "train")[-1]
    assert (event["step"], event["loss"], event["grad_norm"]) == (5, None, None) and "nan" in event["error"]
    fitted, _ = train(tiny, tmp_path)  # goes on from step 3, without the poison
    assert fitted.reason == "done" and [e["step"] for e in read_events(tmp_path, "train")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_data_that_ends_early_is_an_error(tiny: SimpleNamespace, tmp_path: Path):
    with pytest.raises(DataError, match="the data ended at step 4 of 6"):
        train(tiny, tmp_path, batches=islice(tiny.endless(), 3))


def test_no_batch_is_taken_beyond_the_last_step(tiny: SimpleNamespace, tmp_path: Path):
    source = tiny.endless(micro_batches=2)
    train(tiny, tmp_path, steps=3, batches=source)
    assert next(source)[1] == {"position": 8}


def test_the_loop_stays_readable():
    assert len(Path(fit.__code__.co_filename).read_text().splitlines()) <= 200
