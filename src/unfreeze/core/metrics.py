"""How the loss and the metrics of an objective are named and shown. A recipe picks from here or says its own.

A run's start event tells them, so that its page and its live line need not know any by name. The lists below
are also how a run of an earlier version is shown, which told nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from unfreeze.core.schema import Metric

NATS = "nats per supervised token"


def metric(
    field: str, label: str, unit: str, over: str = "tokens", *, mean: bool = False, live: bool = False
) -> Metric:
    """One metric.

    field  its name in Loss.metrics, or "loss"
    over   what it is a mean of: tokens, rows or steps
    mean   whether its mean over the run is said, because training does not change it; else its first and last
           value
    live   whether the live line has it
    """
    shown: Metric = {"field": field, "label": label, "unit": unit, "over": over}
    return shown | ({"mean": True} if mean else {}) | ({"live": True} if live else {})  # type: ignore[return-value]


OF_TOKENS: Sequence[Metric] = (metric("loss", "Loss", NATS, live=True),)
"""Cross entropy."""
OF_TEACHER: Sequence[Metric] = (
    *OF_TOKENS,
    metric("divergence", "Divergence", NATS),
    metric("cross_entropy", "Cross entropy", NATS),
    metric("relations", "Relations", NATS),
    metric("hidden", "Hidden states", "as the term has it"),
)
"""Distillation."""
OF_ANSWERS: Sequence[Metric] = (
    metric("loss", "Loss", "mean over pairs, or answers with a label", "rows", live=True),
    metric("accuracy", "Chosen answer preferred, share", "share", "rows"),
    metric("margin", "Margin of rewards", "nats times beta", "rows"),
    metric("logp_chosen", "Log-probability of chosen answers", "nats per answer", "rows"),
    metric("logp_rejected", "Log-probability of rejected answers", "nats per answer", "rows"),
    metric("length_chosen", "Tokens of chosen answers", "tokens", "rows", mean=True),
    metric("length_rejected", "Tokens of rejected answers", "tokens", "rows", mean=True),
)
"""Preference: answers that are compared."""
EARLIER: Sequence[Metric] = (*OF_TEACHER[1:3], *OF_ANSWERS[1:5], *OF_TEACHER[3:], *OF_ANSWERS[5:])
"""Of a run that told none, whichever of them its events have."""
