"""The loss of indexers that train beside any objective: each follows the attention of its layer.

    Σ_layers (1/T) Σ_t KL_t,     KL_t as in kernels/sparse_attention.py

The attention is a constant to it, and the indexers are constants to the objective. So the two never share a
gradient. The reported loss stays the objective's own; the divergence is a metric.
T tokens of a micro-batch. Source: DeepSeek-V3.2, arXiv:2512.02556, 2.1.1 (there a sum over tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.core.metrics import OF_INDEXERS
from unfreeze.core.taps import Tap, taps_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from unfreeze.core.batch import Batch, Loss


class Following:
    """An objective with the indexers' loss of some layers added to its gradient.

    It counts as much as the objective's mean: a micro-batch's mean over its tokens, times the objective's
    count. metrics: how to show what it adds.
    """

    metrics = OF_INDEXERS

    def __init__(self, objective: Callable[..., Loss], layers: Sequence[int]):
        self.objective, self.own = objective, [Tap(layer, "divergence") for layer in layers]
        self._inner = taps_of(objective)
        self.taps = self._inner | frozenset(self.own)

    def __call__(self, hidden_TD: Tensor, lm_head: nn.Module, batch: Batch, tapped: Any = None) -> Loss:
        import torch  # here: a recipe names its objective before anything needs torch

        loss = self.objective(hidden_TD, lm_head, batch, *([tapped] if self._inner else []))
        mean = torch.stack([tapped[tap].mean() for tap in self.own]).sum()
        divisor = loss.count if loss.metric_count is None else loss.metric_count
        metrics = {**loss.metrics, "indexer_divergence": mean.detach() / len(self.own) * divisor}
        term = mean * loss.count
        return replace(loss, sum=loss.sum + (term - term.detach()), metrics=metrics)
