"""Metrics of a run and their display, from its start event; for runs of earlier versions, from a list."""

from __future__ import annotations

from collections.abc import Sequence

from unfreeze.core.metrics import EARLIER, OF_ANSWERS, OF_TOKENS
from unfreeze.core.schema import Event, Metric, StartEvent
from unfreeze.report.events import last, series


def metrics_of(events: Sequence[Event]) -> list[Metric]:
    """Metrics of a run that have values; the loss comes first."""
    start = last(events, StartEvent)
    metrics = (start.get("metrics") if start else None) or []
    if not metrics:
        compared = series(events, "train", "margin")[1]
        metrics = [*(OF_ANSWERS if compared else OF_TOKENS)[:1], *EARLIER]
    return [
        metric
        for metric in metrics
        if metric["field"] == "loss" or series(events, "train", metric["field"])[1]
    ]


def loss_unit(events: Sequence[Event]) -> str:
    """Unit of the loss."""
    return next(metric["unit"] for metric in [*metrics_of(events), *OF_TOKENS] if metric["field"] == "loss")
