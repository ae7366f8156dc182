"""Implementations of ops that a run used, and how they were chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from unfreeze.core.schema import Event, KernelChoice, KernelsEvent
from unfreeze.report.events import of_kind

KERNEL_HEAD = ("op", "inputs", "dtype", "runs", "decided by", "why")
FIELDS = ("op", "bucket", "dtype", "runs", "origin", "why")


def kernel_choices(events: Sequence[Event]) -> list[KernelChoice]:
    """Latest choice for each op, kind of inputs and dtype, over all sessions of a run."""
    latest: dict[tuple[str, ...], KernelChoice] = {}
    for event in of_kind(events, KernelsEvent):
        for choice in event.get("choices", []):
            latest[tuple(str(choice.get(field, "")) for field in FIELDS[:3])] = choice
    return list(latest.values())


def kernel_rows(events: Sequence[Event]) -> list[tuple[str, ...]]:
    """One row per choice, in KERNEL_HEAD's order, sorted by op."""
    rows = [tuple(str(choice.get(field, "")) for field in FIELDS) for choice in kernel_choices(events)]
    return sorted(rows)


def kernel_words(events: Sequence[Event]) -> str:
    """Number of choices per origin, such as "9 fixed; 2 predicted, not measured (rotary)".

    "" without kernel events. Predicted ops are named, because nobody has measured them on this machine.
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
"""Origin -> words for places without an explaining table."""
