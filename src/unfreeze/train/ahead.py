"""Before a step: what an objective must know of the whole step before its first backward pass.

The auxiliary loss of experts multiplies each token's scores with the share of choices that an expert got in
the whole step. With one micro-batch on one process this is known when its objective is computed. With several
it needs a forward pass of all of them first, which this makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unfreeze.core.batch import Batch
from unfreeze.models import Decoder
from unfreeze.models.recompute import RecomputePolicy
from unfreeze.parallel.processes.collectives import Group


def look_ahead(
    model: Decoder,
    objective: Callable[..., Any],
    micro_batches: Sequence[Batch],
    recompute: RecomputePolicy,
    group: Group,
) -> None:
    """Call objective.begin(micro_batches, load), if it has one.

    micro_batches: all of the step, on every process. load: layer -> choices per expert in all of them, in
    float64 on the model's device; None if there is one micro-batch.
    """
    begin = getattr(objective, "begin", None)
    if begin is None:
        return
    load = None
    if len(micro_batches) > 1:
        with model.looking(), torch.no_grad():
            clear_expert_load(model)
            for batch in group.share(micro_batches):
                model.hidden(batch.to(model.device), recompute=recompute)
            load = {layer: moe.counts_E.double() for layer, moe in model.moe_layers().items()}
        group.sum_(list(load.values()))
    begin(micro_batches, load)


def clear_expert_load(model: Decoder) -> None:
    """Reset each layer's counts of tokens per expert and of replayed choices to 0."""
    for moe in model.moe_layers().values():
        moe.counts_E.zero_()
        moe.replayed_3.zero_()
