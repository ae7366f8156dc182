"""A model beside the original that it was made from: perplexity of both, and KL of what they predict.

    KL(p ‖ q) at a position = Σ_v p(v) (log p(v) − log q(v))        p the original's, q the other's, in nats

over the supervised positions of held-out rows. A mean is over positions; its standard error is that of a
ratio, from the spread of the rows (gain.error_of): positions of a row are not independent.

Logits are float32, all sums float64. T tokens, V vocabulary, N supervised positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.core.errors import DataError
from unfreeze.evaluate.gain import error_of

AT_ONCE = 2**21
"""Logits alive at once, of each model, in float64: 16 MiB."""

Head = Callable[[Tensor], Tensor]
"""Hidden states [n, D] -> logits [n, V]."""


@dataclass(frozen=True)
class Divergence:
    """Figures over `tokens` supervised positions of `rows` rows.

    loss            of the other model, nats per token; original: of the original
    kl              KL(original ‖ other), mean per token; kl_error: its standard error, inf for one row
    loss_error      standard error of loss − original
    agree           share of positions at which both have the same most likely token
    """

    loss: float
    original: float
    loss_error: float
    kl: float
    kl_error: float
    agree: float
    tokens: int
    rows: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return _exp(self.loss)

    @property
    def original_perplexity(self) -> float:
        """exp(original)."""
        return _exp(self.original)


@dataclass
class _Sums:
    """Sums of each row: losses of both, KL, positions with the same best token, positions."""

    loss: list[float] = field(default_factory=list)
    original: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agree: list[float] = field(default_factory=list)
    count: list[float] = field(default_factory=list)


@torch.no_grad()
def divergence(
    batches: Sequence[Batch],
    original: Sequence[Tensor],
    other: Sequence[Tensor],
    original_head: Head,
    other_head: Head,
) -> Divergence:
    """Compare two models by their hidden states after the final norm, [T, D] for each batch.

    Raises DataError if no token is supervised.
    """
    sums = _Sums()
    for batch, h_TD, g_TD in zip(batches, original, other, strict=True):
        where_N = batch.supervised()
        targets_N = batch.targets_T[where_N]
        h_ND, g_ND = h_TD[where_N], g_TD[where_N]
        each: list[Tensor] = []
        step = max(1, AT_ONCE // max(1, original_head(h_ND[:1]).shape[-1]))
        for first in range(0, len(where_N), step):
            some = slice(first, first + step)
            p_NV, q_NV = original_head(h_ND[some]), other_head(g_ND[some])
            each.append(compared(p_NV, q_NV, targets_N[some]))
        if not each:
            continue
        figures_4N = torch.cat(each, 1)
        ones_N = torch.ones(len(where_N), dtype=torch.float64)
        for own, values in zip(
            (sums.loss, sums.original, sums.kl, sums.agree, sums.count), (*figures_4N, ones_N), strict=True
        ):
            own += batch.per_document(values).tolist()
    rows = [place for place, count in enumerate(sums.count) if count]
    if not rows:
        raise DataError(
            "0 tokens of the rows to measure on are supervised; at least 1 is needed",
            next="inspect them: unfreeze data show FILE --model MODEL",
        )
    counts = [sums.count[row] for row in rows]
    tokens = sum(counts)
    loss, first, kl, agree = (
        [values[row] for row in rows] for values in (sums.loss, sums.original, sums.kl, sums.agree)
    )
    return Divergence(
        loss=sum(loss) / tokens,
        original=sum(first) / tokens,
        loss_error=error_of([a - b for a, b in zip(loss, first, strict=True)], counts),
        kl=sum(kl) / tokens,
        kl_error=error_of(kl, counts),
        agree=sum(agree) / tokens,
        tokens=int(tokens),
        rows=len(rows),
    )


def compared(p_NV: Tensor, q_NV: Tensor, targets_N: Tensor) -> Tensor:
    """float64 [4, N]: −log q and −log p of the target, KL(p ‖ q), 1 if the most likely tokens are equal."""
    log_p_NV, log_q_NV = p_NV.double().log_softmax(-1), q_NV.double().log_softmax(-1)
    kl_N = (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1)
    of_target = targets_N.unsqueeze(-1)
    same_N = log_p_NV.argmax(-1).eq(log_q_NV.argmax(-1)).double()
    return torch.stack(
        [-log_q_NV.gather(-1, of_target)[:, 0], -log_p_NV.gather(-1, of_target)[:, 0], kl_N, same_N]
    )


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # exp(709) is the largest float64
