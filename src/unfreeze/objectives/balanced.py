"""The auxiliary loss that balances experts, beside any objective.

    L = (1 / M) Σ_m E Σ_e f_me P_me,   f_me = n_me / (K T),   P_me = (1 / T) Σ_t p_tme

over the T tokens of the whole step, all micro-batches and processes together. n: choices of an expert, which
are constants; p: the router's scores over their sum. L is 1 where every expert has the same share, whatever K
and E. transformers' load_balancing_loss_func is K times as large: it does not divide n by K.
The reported loss stays the objective's own; L is a metric. In evaluation there is none.

M mixtures of experts (a layer, or each pass of a chain), E experts, K chosen per token.
Sources: GShard, arXiv:2006.16668; Switch Transformer, arXiv:2101.03961, 2.2; DeepSeek-V3, arXiv:2412.19437,
2.1.2, for scores that are no softmax; arXiv:2501.11873, for shares of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from unfreeze.core.metrics import OF_BALANCE
from unfreeze.core.taps import Tap, taps_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch, Loss


class Mixture(Protocol):
    """A mixture of experts as the loss sees it: its choices so far, and how many a token has."""

    counts_E: Tensor
    gate: Any


class Balanced:
    """An objective with weight · L added to its gradient.

    mixtures: layer -> its mixtures by the keys of the step's load, in the order of the tap "router". metrics:
    how to show what it adds.
    """

    def __init__(
        self, objective: Callable[..., Loss], mixtures: Mapping[int, Mapping[int, Mixture]], weight: float
    ):
        self.objective, self.weight = objective, weight
        self.mixtures = {Tap(layer, "router"): of_layer for layer, of_layer in mixtures.items()}
        self._inner = taps_of(objective)
        self.taps = self._inner | self.mixtures.keys()
        self.metrics = (*getattr(objective, "metrics", ()), *OF_BALANCE)
        self._load: Mapping[int, Tensor] | None = None
        self._tokens, self._divisor = 0, 1.0

    def begin(self, micro_batches: Sequence[Batch], load: Mapping[int, Tensor] | None) -> None:
        """Note the step's size and its choices, which are known before it (train/ahead.py).

        load: None if there is one micro-batch, whose choices are then counted by its own pass.
        """
        self._tokens = sum(batch.num_tokens for batch in micro_batches)
        self._divisor = max(sum(batch.count for batch in micro_batches), 1.0)
        self._load = load

    def __call__(self, hidden_TD: Tensor, lm_head: nn.Module, batch: Batch, tapped: Any = None) -> Loss:
        import torch  # here: a recipe names its objective before anything needs torch

        loss = self.objective(hidden_TD, lm_head, batch, *([tapped] if self._inner else []))
        if not self._tokens or not torch.is_grad_enabled():
            return loss
        parts: list[Tensor] = []
        for tap, mixtures in self.mixtures.items():
            for (key, mixture), p_TE in zip(
                mixtures.items(), tapped[tap].chunk(len(mixtures), dim=1), strict=True
            ):
                n_E = mixture.counts_E if self._load is None else self._load[key]
                f_E = n_E.double() / (mixture.gate.top_k * self._tokens)
                P_E = p_TE.sum(0).double() / self._tokens
                parts.append(len(n_E) * (f_E * P_E).sum())
        value = torch.stack(parts).mean()
        # train/step.py divides once by the supervised tokens of the step, or metrics by their own count
        counted = self._divisor if loss.metric_count is None else loss.metric_count
        metrics = {**loss.metrics, "balance_loss": value.detach() * counted}
        term = (self.weight * value * self._divisor).to(loss.sum.dtype)
        return replace(loss, sum=loss.sum + (term - term.detach()), metrics=metrics)
