"""Which metrics a run has and how they are shown: as its start event tells; else as earlier versions did."""

from __future__ import annotations

from collections.abc import Sequence

from unfreeze.core.metrics import EARLIER, OF_ANSWERS, OF_TOKENS
from unfreeze.core.schema import Event, Metric, StartEvent
from unfreeze.report.events import last, series


def metrics_of(events: Sequence[Event]) -> list[Metric]:
    """The loss first, then those that are shown beside it and have a value."""
    start = last(events, StartEvent)
    told = (start.get("metrics") if start else None) or []
    if not told:
        compared = series(events, "train", "margin")[1]
        told = [*(OF_ANSWERS if compared else OF_TOKENS)[:1], *EARLIER]
    return [
        metric for metric in told if metric["field"] == "loss" or series(events, "train", metric["field"])[1]
    ]


def loss_unit(events: Sequence[Event]) -> str:
    """What the loss is counted in."""
    return next(metric["unit"] for metric in [*metrics_of(events), *OF_TOKENS] if metric["field"] == "loss")
