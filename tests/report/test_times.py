"""The named times of a run add up to the time between its first event and its end."""

from __future__ import annotations

from typing import Any

import pytest

from unfreeze.report.times import seconds_by_part, time_words, tokens_per_second


def run(first: float = 9.0, **more: Any) -> list[Any]:
    steps = [
        {"kind": "train", "step": i, "seconds": first if i == 1 else 2.0, "time": 30.0 + 2 * i}
        for i in range(1, 6)
    ]
    return [
        {"kind": "data", "step": 0, "time": 10.0},
        {"kind": "timing", "step": 0, "cells": 9, "seconds": 1.0, "time": 11.0},
        {"kind": "load", "step": 0, "seconds": 3.0, "time": 14.0},
        {"kind": "gap", "step": 0, "when": "before", "seconds": 20.0, "time": 34.0},
        {"kind": "eval", "step": 0, "seconds": 4.0, "time": 38.0},
        {"kind": "start", "step": 0, "time": 38.0},
        *steps,
        {"kind": "eval", "step": 5, "seconds": 1.0, "time": 60.0},
        {"kind": "save", "step": 5, "path": "x", "seconds": 0.5, "time": 60.0},
        {"kind": "gap", "step": 5, "when": "after", "seconds": 22.0, "time": 82.0},
        {"kind": "end", "step": 5, "time": 82.0},
    ]


def test_they_are_named_and_add_up():
    found = seconds_by_part(run())
    assert found == {
        "steps": 10.0,
        "compiling": 7.0,  # the first step beyond the median of the others
        "choosing kernels": 1.0,
        "loading": 3.0,
        "answers": 42.0,
        "validation": 5.0,
        "scores": 0,
        "saving": 0.5,
        "other": 3.5,
    }
    assert sum(found.values()) == 82.0 - 10.0
    assert time_words(run()) == (
        "1 min 12 s; steps 10 s, answers 42 s, compiling 7.0 s, validation 5.0 s, loading 3.0 s,"
        " choosing kernels 1.0 s, other 3.5 s"
    )  # half a second of saving is less than a hundredth


def test_tokens_per_second_are_those_of_the_steps_without_compiling():
    events = [event | {"tokens": 100} if event["kind"] == "train" else event for event in run()]
    assert seconds_by_part(events)["compiling"] == 7.0 and tokens_per_second(events) == 5 * 100 / 10.0
    assert tokens_per_second([]) is tokens_per_second(events[:2]) is None


@pytest.mark.parametrize("first", [2.0, 1.0])
def test_nothing_compiles_where_the_first_step_is_as_the_others(first):
    assert seconds_by_part(run(first))["compiling"] == 0


def test_a_resumed_run_compiles_once_a_session_and_its_pause_is_no_time_of_it():
    resumed = [
        {**event, "time": event["time"] + 1000}
        for event in run()
        if event["kind"] in ("start", "train", "end")
    ]
    found = seconds_by_part([*run()[:-1], *resumed])
    assert found["compiling"] == 14.0 and found["steps"] == 20.0
    assert sum(found.values()) == (82.0 - 10.0) + (1082.0 - 1038.0)


def test_a_session_lasts_from_its_command_to_its_last_event():
    """A start says when the command began; else a session begins with its data. Answers may follow the end."""
    first = [event | ({"begun": 3.0} if event["kind"] == "start" else {}) for event in run()[:-1]]
    killed = [event for event in first if event["kind"] not in ("gap", "end") or event["step"] == 0]
    later = [{"kind": "warning", "step": 5, "message": "m", "time": 995.0}]
    later += [{**event, "time": event["time"] + 1000} for event in run() if event["kind"] != "load"]
    later += [{"kind": "sample", "step": 5, "when": "after", "time": 1090.0}]
    assert sum(seconds_by_part([*killed, *later]).values()) == (60.0 - 3.0) + (1090.0 - 1010.0)
    # two steps tell nothing of compiling
    assert seconds_by_part(run()[:7])["compiling"] == 0


def test_events_of_an_earlier_version_have_no_seconds_of_answers():
    earlier = [
        {k: v for k, v in event.items() if event["kind"] != "gap" or k != "seconds"} for event in run()
    ]
    assert seconds_by_part(earlier)["answers"] == 0 and seconds_by_part(earlier)["other"] == pytest.approx(
        45.5
    )
