"""Where the time of a run went: kernels, loading, compiling, answers, steps, validation, saving, the rest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from unfreeze.core.schema import EndEvent, Event, StartEvent, TrainEvent
from unfreeze.core.units import format_seconds
from unfreeze.report.events import last, of_kind, series

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


def times(events: Sequence[Event]) -> dict[str, float]:
    """Part -> seconds, the steps first. Compiling: what the first step of a session takes beyond its median.

    "other" is what no event accounts for, of a run in one session: imports, reading rows, sample answers of
    an earlier version.
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
    seconds = times(events)["steps"]
    return sum(series(events, "train", "tokens")[1]) / seconds if seconds > 0 else None


def time_words(events: Sequence[Event]) -> str:
    """'1 min 02 s; steps 17 s, answers 42 s, compiling 3.1 s', the longest first behind the steps."""
    parts = times(events)
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
    """From the first event to the end, of a run in one session; else unknown."""
    end = last(events, EndEvent)
    begun, ended = events[0].get("time") if events else None, end.get("time") if end else None
    if begun is None or ended is None or len(of_kind(events, StartEvent)) > 1:
        return None
    return ended - begun
