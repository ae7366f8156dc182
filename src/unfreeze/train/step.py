"""One optimizer step over one or more micro-batches: sums of losses, divided once by the number of supervised tokens of all of them.

The count is added up on the host before the first backward, so each micro-batch's gradient already carries its share: accumulation
over any cut of the same tokens gives the same gradient (FAILURES N3), and a micro-batch without supervised tokens adds 0 (N2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from unfreeze.core.batch import Batch, Loss
from unfreeze.train.optim import AdamW, NonFinite

if TYPE_CHECKING:
    from unfreeze.models import Decoder

Objective = Callable[[Tensor, nn.Module, Batch], Loss]
"""(hidden_TD, lm_head, batch) -> Loss, for example objectives.cross_entropy."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step found. loss and metrics are sums over all micro-batches divided by the one global count.

    tokens, supervised_tokens   of all micro-batches; supervised: positions of weight > 0.
    learning_rate               read back from the optimizer.     grad_norm   before clipping; gradients were then times clip_scale.
    expert_load                 MoE layer -> tokens each expert was given in this step's forward passes.
    """

    loss: float
    metrics: dict[str, float]
    tokens: int
    supervised_tokens: int
    learning_rate: float
    grad_norm: float
    clip_scale: float
    expert_load: dict[int, list[int]]


def train_step(
    model: Decoder,
    optimizer: AdamW,
    micro_batches: Sequence[Batch],
    objective: Objective,
    *,
    learning_rate: float,
    max_norm: float,
    through: Callable[..., Tensor],
) -> StepResult:
    """w -= AdamW(grad of sum_m loss_m / max(sum_m count_m, 1)), gradients clipped to max_norm (0: not clipped).

    micro_batches on the host; through is models.plain or models.recompute. Raises NonFinite before the update if the loss or a gradient is
    not finite, ValueError if the objective counts other tokens than the batches' weights.
    """
    count = sum(float(batch.weights_T.sum()) for batch in micro_batches)
    divisor = max(count, 1.0)
    optimizer.zero_grad()
    clear_expert_load(model)  # an evaluation since the last step counts nowhere (FAILURES M2)
    loss_sum, counted, metrics = 0.0, 0.0, dict[str, float]()
    for host_batch in micro_batches:
        batch = host_batch.to(model.device)
        loss = objective(model.hidden(batch, through=through), model.lm_head, batch)
        (loss.sum / divisor).backward()
        optimizer.collect()
        loss_sum += float(loss.sum.detach())
        counted += loss.count
        for name, value in loss.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value / divisor
    if not math.isfinite(loss_sum):
        raise NonFinite(f"the loss is {loss_sum / divisor} over {count:.0f} supervised tokens")
    if abs(counted - count) > 1e-5 * divisor:
        raise ValueError(f"the objective counted {counted} supervised tokens, the batches' weights say {count}")
    update = optimizer.update(learning_rate, max_norm)
    return StepResult(
        loss=loss_sum / divisor,
        metrics=metrics,
        tokens=sum(batch.num_tokens for batch in micro_batches),
        supervised_tokens=sum(int(batch.weights_T.gt(0).sum()) for batch in micro_batches),
        learning_rate=optimizer.learning_rate,
        grad_norm=update.grad_norm,
        clip_scale=update.clip_scale,
        expert_load=read_expert_load(model),
    )


def read_expert_load(model: Decoder) -> dict[int, list[int]]:
    """MoE layer -> tokens per expert since the counts were last cleared; {} for a dense model."""
    return {layer: _counts(moe).tolist() for layer, moe in model.moe_layers().items()}


def clear_expert_load(model: Decoder) -> None:
    for moe in model.moe_layers().values():
        _counts(moe).zero_()


def _counts(moe: Any) -> Tensor:
    return moe.counts_E
