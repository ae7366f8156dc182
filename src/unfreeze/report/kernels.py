"""Which implementation of each op a run used, and what decided it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from unfreeze.core.schema import Event, KernelChoice, KernelsEvent
from unfreeze.report.events import of_kind

KERNEL_HEAD = ("op", "inputs", "dtype", "runs", "decided by", "why")
FIELDS = ("op", "bucket", "dtype", "runs", "origin", "why")


def kernel_choices(events: Sequence[Event]) -> list[KernelChoice]:
    """Of all sessions of a run; the last word on each op, dtype and kind of inputs."""
    found: dict[tuple[str, ...], KernelChoice] = {}
    for event in of_kind(events, KernelsEvent):
        for choice in event.get("choices", []):
            found[tuple(str(choice.get(field, "")) for field in FIELDS[:3])] = choice
    return list(found.values())


def kernel_rows(events: Sequence[Event]) -> list[tuple[str, ...]]:
    """A row per choice, in KERNEL_HEAD's order, by op."""
    rows = [tuple(str(choice.get(field, "")) for field in FIELDS) for choice in kernel_choices(events)]
    return sorted(rows)


def kernel_words(events: Sequence[Event]) -> str:
    """How many choices each origin decided: "9 fixed; 2 predicted, not measured (rotary)".

    "" where a run has not said. Ops that run as predicted are named: nobody has measured them there.
    """
    choices = kernel_choices(events)
    counted = Counter(str(choice.get("origin", "unknown")) for choice in choices)
    named = sorted({choice.get("op", "") for choice in choices if choice.get("origin") == PREDICTED})
    words = [f"{count} {PLAIN.get(origin, origin)}" for origin, count in counted.most_common()]
    return "; ".join(f"{w} ({', '.join(named)})" if w.endswith(f" {PREDICTED}") else w for w in words)


PREDICTED = "predicted, not measured"
PLAIN = {
    "timed here": "timed on this machine",
    "measured here": "chosen by measurements on this machine",
    "measured on its class": "chosen by measurements on such a processor",
    "by design": "fixed",
}
"""Origin -> what it is called where no table explains it."""
