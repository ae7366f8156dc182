"""Time of a run by part: kernels, loading, compiling, answers, steps, validation, saving, other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from unfreeze.core.schema import Event, StartEvent, TrainEvent
from unfreeze.core.units import format_seconds
from unfreeze.report.events import of_kind, series

LEAST = 0.01  # share of the whole; smaller parts are not named
PARTS = {
    "choosing kernels": "timing",
    "loading": "load",
    "answers": "gap",
    "validation": "eval",
    "scores": "score",
    "saving": "save",
}
"""Part -> kind of events whose seconds it sums."""
FEW = 3  # with fewer steps in a session, compile time cannot be separated


def seconds_by_part(events: Sequence[Event]) -> dict[str, float]:
    """Return part -> seconds, steps first. Compiling: the first step of a session minus its median step.

    "other" is time without an event: imports, reading rows, sample answers of earlier versions. Writing the
    adapter after the last event is not included.
    """
    steps = sum(series(events, "train", "seconds")[1])
    compiled = sum(_compiling(session) for session in _sessions(events))
    parts = {"steps": steps - compiled, "compiling": compiled}
    for name, kind in PARTS.items():
        parts[name] = sum(series(events, kind, "seconds")[1])
    whole = _whole(events)
    if whole is not None:
        parts["other"] = max(0.0, whole - sum(parts.values()))
    return parts


def tokens_per_second(events: Sequence[Event]) -> float | None:
    """Tokens per second of all training steps and sessions, without compile time.

    None without a step.
    """
    seconds = seconds_by_part(events)["steps"]
    return sum(series(events, "train", "tokens")[1]) / seconds if seconds > 0 else None


def speed_words(events: Sequence[Event]) -> str:
    """'6,043; without compiling', or 'with' it if no session has enough steps to tell; "" without a step."""
    speed = tokens_per_second(events)
    if speed is None:
        return ""
    apart = any(len(session) >= FEW for session in _sessions(events))
    return f"{speed:,.0f}; {'without' if apart else 'with'} compiling"


def time_words(events: Sequence[Event]) -> str:
    """Words: '1 min 02 s; steps 17 s, answers 42 s, compiling 3.1 s', the longest first after steps."""
    parts = seconds_by_part(events)
    whole = sum(parts.values())
    named = [(name, seconds) for name, seconds in parts.items() if seconds >= LEAST * whole and seconds > 0]
    ordered = sorted(named, key=lambda part: (part[0] != "steps", part[0] == "other", -part[1]))
    words = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in ordered)
    return f"{format_seconds(whole)}; {words}"


def _sessions(events: Sequence[Event]) -> list[list[TrainEvent]]:
    """Train events of each session (start of the run)."""
    sessions: list[list[TrainEvent]] = [[]]
    for event in events:
        if event["kind"] == "start":
            sessions.append([])
        sessions[-1] += of_kind([event], TrainEvent)
    return sessions


def compiling(seconds: Sequence[float]) -> float:
    """Seconds of a session's first step beyond the median of the others; 0 with fewer than FEW steps."""
    if len(seconds) < FEW:
        return 0.0
    return max(0.0, seconds[0] - statistics.median(seconds[1:]))


def _compiling(steps: Sequence[TrainEvent]) -> float:
    return compiling([event["seconds"] for event in steps if "seconds" in event])


def _whole(events: Sequence[Event]) -> float | None:
    """Seconds from the command (or the first event) to the last event, summed over sessions.

    None if an event has no time. Work of a killed session after its last save does not count.
    """
    firsts, starts = [0], [place for place, event in enumerate(events) if event["kind"] == "start"]
    for before, start in pairwise(starts):  # a session starts with its data event
        accounts = [place for place in range(before + 1, start) if events[place]["kind"] == "data"]
        firsts.append(accounts[-1] if accounts else start)
    whole = 0.0
    for first, end in pairwise([*firsts, len(events)]):
        # warnings of a resumed run come before its data event but belong to that session
        counted = [event for event in events[first:end] if event["kind"] != "warning" or end == len(events)]
        begun = next((event.get("begun") for event in of_kind(counted, StartEvent)), None)
        begun, ended = (begun or counted[0].get("time"), counted[-1].get("time")) if counted else (None, None)
        if begun is None or ended is None:
            return None
        whole += ended - begun
    return whole
