"""Where the time of a run went: kernels, loading, compiling, answers, steps, validation, saving, the rest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from unfreeze.core.schema import Event, StartEvent, TrainEvent
from unfreeze.core.units import format_seconds
from unfreeze.report.events import of_kind, series

LEAST = 0.01  # of all: a smaller part is not named
PARTS = {
    "choosing kernels": "timing",
    "loading": "load",
    "answers": "gap",
    "validation": "eval",
    "saving": "save",
}
"""Part -> the events whose seconds it has."""
FEW = 3  # steps of a session: of fewer nothing tells compiling from the step itself


def seconds_by_part(events: Sequence[Event]) -> dict[str, float]:
    """Part -> seconds, the steps first. Compiling: what the first step of a session takes beyond its median.

    "other" is what no event accounts for: imports, reading rows, sample answers of an earlier version. The
    adapter that is written behind the last event is not among them.
    """
    steps = sum(series(events, "train", "seconds")[1])
    compiling = sum(_compiling(session) for session in _sessions(events))
    parts = {"steps": steps - compiling, "compiling": compiling}
    for name, kind in PARTS.items():
        parts[name] = sum(series(events, kind, "seconds")[1])
    whole = _whole(events)
    if whole is not None:
        parts["other"] = max(0.0, whole - sum(parts.values()))
    return parts


def tokens_per_second(events: Sequence[Event]) -> float | None:
    """Tokens over seconds of all training steps, compiling left out, every session of a resumed run together.

    None without a step.
    """
    seconds = seconds_by_part(events)["steps"]
    return sum(series(events, "train", "tokens")[1]) / seconds if seconds > 0 else None


def time_words(events: Sequence[Event]) -> str:
    """'1 min 02 s; steps 17 s, answers 42 s, compiling 3.1 s', the longest first behind the steps."""
    parts = seconds_by_part(events)
    whole = sum(parts.values())
    named = [(name, seconds) for name, seconds in parts.items() if seconds >= LEAST * whole and seconds > 0]
    ordered = sorted(named, key=lambda part: (part[0] != "steps", part[0] == "other", -part[1]))
    words = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in ordered)
    return f"{format_seconds(whole)}; {words}"


def _sessions(events: Sequence[Event]) -> list[list[TrainEvent]]:
    """The steps of each time the run was started."""
    found: list[list[TrainEvent]] = [[]]
    for event in events:
        if event["kind"] == "start":
            found.append([])
        found[-1] += of_kind([event], TrainEvent)
    return found


def _compiling(steps: Sequence[TrainEvent]) -> float:
    seconds = [event["seconds"] for event in steps if "seconds" in event]
    if len(seconds) < FEW:
        return 0.0
    return max(0.0, seconds[0] - statistics.median(seconds[1:]))


def _whole(events: Sequence[Event]) -> float | None:
    """From the command, or the first event where it is not known, to the last one: of every session, summed.

    None where an event has no time. What a killed session did behind its last save is no part of the run.
    """
    firsts, starts = [0], [place for place, event in enumerate(events) if event["kind"] == "start"]
    for before, start in pairwise(starts):  # a session begins with its account of the data
        accounts = [place for place in range(before + 1, start) if events[place]["kind"] == "data"]
        firsts.append(accounts[-1] if accounts else start)
    whole = 0.0
    for first, end in pairwise([*firsts, len(events)]):
        # what a resumed run warns of stands before its account, and is said in that session
        told = [event for event in events[first:end] if event["kind"] != "warning" or end == len(events)]
        begun = next((event.get("begun") for event in of_kind(told, StartEvent)), None)
        begun, ended = (begun or told[0].get("time"), told[-1].get("time")) if told else (None, None)
        if begun is None or ended is None:
            return None
        whole += ended - begun
    return whole
