"""Names and formats of the loss and of objectives' metrics. A recipe chooses from here or defines its own.

A run's start event lists them, so the report and the live line need not know any by name. The lists below
also serve for runs of earlier versions, whose events have none.
"""

from __future__ import annotations

from collections.abc import Sequence

from unfreeze.core.schema import Metric

NATS = "nats per supervised token"


def metric(
    field: str, label: str, unit: str, over: str = "tokens", *, mean: bool = False, live: bool = False
) -> Metric:
    """Describe one metric.

    field  its name in Loss.metrics, or "loss"
    over   the mean is over: tokens, rows or steps
    mean   True: report its mean over the run, because training does not change it. False: its first and last
           value
    live   True if the live line shows it
    """
    shown: Metric = {"field": field, "label": label, "unit": unit, "over": over}
    return shown | ({"mean": True} if mean else {}) | ({"live": True} if live else {})  # type: ignore[return-value]


OF_TOKENS: Sequence[Metric] = (metric("loss", "Loss", NATS, live=True),)
"""Metrics of cross entropy."""
OF_TEACHER: Sequence[Metric] = (
    *OF_TOKENS,
    metric("divergence", "Divergence", NATS),
    metric("cross_entropy", "Cross entropy", NATS),
    metric("relations", "Relations", NATS),
    metric("hidden", "Hidden states", "as the term has it"),
)
"""Metrics of distillation."""
OF_ANSWERS: Sequence[Metric] = (
    metric("loss", "Loss", "mean over pairs, or over labelled answers", "rows", live=True),
    metric("accuracy", "Chosen answer preferred, share", "share", "rows"),
    metric("margin", "Margin of rewards", "nats times beta", "rows"),
    metric("logp_chosen", "Log-probability of chosen answers", "nats per answer", "rows"),
    metric("logp_rejected", "Log-probability of rejected answers", "nats per answer", "rows"),
    metric("length_chosen", "Tokens of chosen answers", "tokens", "rows", mean=True),
    metric("length_rejected", "Tokens of rejected answers", "tokens", "rows", mean=True),
)
"""Metrics of preference losses."""
OF_POLICY: Sequence[Metric] = (
    metric("loss", "Loss", "as the policy's objective has it", live=True),
    metric("entropy", "Entropy, estimated", "nats per sampled token", live=True),
    metric("kl", "Distance to the model as it began", "nats per sampled token"),
    metric("gap", "Trainer and sampler differ", "nats per sampled token", mean=True),
    metric("gap_max", "Trainer and sampler differ at most", "nats", "steps", mean=True),
    metric("ratio", "Ratio to the sampler", "ratio", mean=True),
    metric("clip_fraction", "Clipped tokens, share", "share", mean=True, live=True),
    metric("masked", "Tokens masked by the correction, share", "share", mean=True),
)
"""Metrics of a policy trained on rewards."""
OF_INDEXERS: Sequence[Metric] = (
    metric("indexer_divergence", "Indexers differ from attention", "nats per token and layer"),
)
"""Metrics of indexers that train beside any loss (objectives/following.py)."""
OF_LOGITS: Sequence[Metric] = (metric("largest_logit", "Largest attention logit", "before softmax", "steps"),)
"""Metrics of attention's scores (train/qk_clip.py)."""
OF_BALANCE: Sequence[Metric] = (metric("balance_loss", "Auxiliary loss of experts", "1 if all are even"),)
"""Metrics of the auxiliary loss that balances experts (objectives/balanced.py)."""
EARLIER: Sequence[Metric] = (*OF_TEACHER[1:3], *OF_ANSWERS[1:5], *OF_TEACHER[3:], *OF_ANSWERS[5:])
"""Metrics of a run whose start event lists none; those in its events are shown."""
