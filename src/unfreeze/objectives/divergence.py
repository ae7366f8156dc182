"""Distillation: the divergence of the student's next-token distribution from a teacher's.

Blocks of rows go through the student's and the teacher's head, so the logits of all rows are never in memory
at once (kernels/linear_cross_entropy). T tokens of a step, N supervised ones, B rows of a block, D model
width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch, Loss

    LogProbs = Callable[[slice, Tensor], Tensor]
    """(some of the supervised rows, the student's log p_BV of them) -> the teacher's log q_BV, in new memory
    and in the dtype of log p_BV."""
    Teacher = Callable[[Batch], LogProbs]
    """A batch -> the teacher's outputs at its supervised rows (Batch.supervised), without gradients."""


def divergence(
    hidden_TD: Tensor,
    lm_head: nn.Module,
    batch: Batch,
    teacher: Teacher,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    alpha: float = 0.0,
    vocab: int | None = None,
    block_rows: int | None = None,
) -> Loss:
    """Return sum_t w_t · (alpha · CE_t + (1 - alpha) · τ² · D_t), the divergence D_t between p and q.

    p is the student's softmax of logits / τ, q the teacher's, m = (1 - beta) p + beta q, and
    D = KL(q ‖ p)                                       beta 0: forward KL
    D = KL(p ‖ q)                                       beta 1: reverse KL
    D = beta · KL(q ‖ m) + (1 - beta) · KL(p ‖ m)       between: generalized Jensen-Shannon
    CE is cross entropy with the data's own next token, at temperature 1, over all rows of the head.

    temperature  τ. τ² keeps the size of the gradient about the same for any τ (Hinton et al.).
    vocab        p and q are over the first `vocab` ids; further rows of a head are padding, which may differ
                 between student and teacher. None: all of the student's.
    metrics      sums of w_t: "divergence" D_t, "cross_entropy" CE_t, "correct" as in cross_entropy.
    The gradient reaches hidden_TD and the trainable parts of lm_head; the teacher gets none. Rows without
    weight are never computed.

    Sources: 1503.02531 (temperature, alpha), 2306.13649 (generalized JSD), 2306.08543 (reverse KL). D equals
    TRL's generalized_jsd_loss, which has no τ² and no cross entropy, and divides by the number of tokens.
    """
    import torch

    from unfreeze.core.batch import Loss
    from unfreeze.kernels.linear_cross_entropy import sums_through_head

    rows_N = batch.supervised()
    weights_N = batch.weights_T.index_select(0, rows_N)
    with torch.no_grad():
        log_q = teacher(batch)
    hidden_ND = hidden_TD.index_select(0, rows_N)
    words = int(lm_head.out_features)  # type: ignore[arg-type]
    sums = _Divergence(
        log_q,
        batch.targets_T.index_select(0, rows_N),
        weights_N.to(torch.promote_types(hidden_ND.dtype, torch.float32)),
        min(vocab or words, words),
        beta,
        temperature,
        alpha,
    )
    trained = any(parameter.requires_grad for parameter in lm_head.parameters())
    size = block_rows or divergence_rows(
        len(hidden_ND), words, hidden_ND.dtype, hidden_ND.device, trained, beta
    )
    total, apart, entropy, correct = sums_through_head(hidden_ND, lm_head, sums, size)
    metrics = {"divergence": apart, "cross_entropy": entropy, "correct": correct}
    return Loss(sum=total, count=weights_N.sum(), metrics=metrics)


def bytes_per_logit(dtype: torch.dtype, beta: float) -> int:
    """Return bytes per logit of a block: the logits, three float32 tensors, and a fourth for a mixture."""
    exact = max(dtype.itemsize, 4)
    return dtype.itemsize + exact * (3 if beta in (0, 1) else 4)


def divergence_rows(
    rows: int, vocab: int, dtype: torch.dtype, device: torch.device, trained: bool, beta: float
) -> int:
    """Return rows per block: as many bytes as cross entropy's blocks, which need less per logit."""
    from unfreeze.kernels.linear_cross_entropy.blocks import rows_per_block

    return rows_per_block(rows, vocab, bytes_per_logit(dtype, beta), device.type, trained)


class _Divergence:
    """The sums of `divergence` (kernels/linear_cross_entropy/blocks.py: Sums)."""

    def __init__(
        self,
        log_q: LogProbs,
        targets_N: Tensor,
        weights_N: Tensor,
        vocab: int,
        beta: float,
        temperature: float,
        alpha: float,
    ):
        self.log_q, self.targets_N, self.weights_N, self.vocab = log_q, targets_N, weights_N, vocab
        self.beta, self.temperature, self.alpha = beta, temperature, alpha
        self.dtype = weights_N.dtype
        self.apart, self.entropy, self.correct = (weights_N.new_zeros(()) for _ in range(3))

    def add(self, logits_BV: Tensor, rows: slice, wanted: bool) -> Tensor:
        from unfreeze.kernels.linear_cross_entropy.reference import softmax_gradient

        weights_B, tau = self.weights_N[rows], self.temperature

        # D, and dD/du by u = logits / τ. The scale: τ² from the loss, 1 / τ from u
        log_p_BV = log_softmax(logits_BV[:, : self.vocab], tau, self.dtype)
        log_q_BV = self.log_q(rows, log_p_BV)
        apart_B, du_BV = _apart(log_p_BV, log_q_BV, self.beta)
        self.apart += (apart_B * weights_B).sum()
        du_BV *= ((1 - self.alpha) * tau * weights_B).unsqueeze(1)
        del log_p_BV, log_q_BV

        # cross entropy, whose gradient overwrites the logits; if no gradient is wanted, only its value is
        # computed
        log_likelihood_B, wins_B, gradient_BV = softmax_gradient(
            logits_BV, self.targets_N[rows], self.alpha * weights_B, wanted and self.alpha > 0
        )
        self.entropy -= (log_likelihood_B * weights_B).sum()
        self.correct += (wins_B * weights_B).sum()
        if wanted:
            if not self.alpha:
                gradient_BV.zero_()
            gradient_BV[:, : self.vocab] += du_BV.to(gradient_BV.dtype)
        return gradient_BV

    def totals(self) -> tuple[Tensor, ...]:
        total = self.alpha * self.entropy + (1 - self.alpha) * self.temperature**2 * self.apart
        return total, self.apart, self.entropy, self.correct


def log_softmax(logits_BV: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Return log softmax(z / τ) in `dtype`, in new memory."""
    if temperature == 1:
        return logits_BV.log_softmax(-1, dtype=dtype)
    return (logits_BV.to(dtype) / temperature).log_softmax(-1)


def _apart(log_p_BV: Tensor, log_q_BV: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return (D_B, dD/du_BV with p = softmax(u)). Both inputs are overwritten.

    forward      Σ q (log q - log p)        du = p - q
    reverse      Σ p (log p - log q)        du = p (log p - log q - D)
    generalized  β Σ q (log q - log m) + (1 - β) K, K = Σ p (log p - log m)
                                            du = (1 - β) p (log p - log m - K)
    """
    import torch

    if beta == 0:
        q_BV = log_q_BV.exp()
        apart_B = log_q_BV.sub_(log_p_BV).mul_(q_BV).sum(-1)
        return apart_B, log_p_BV.exp_().sub_(q_BV)
    p_BV = log_p_BV.exp()
    if beta == 1:
        log_ratio_BV, free_BV = log_p_BV.sub_(log_q_BV), log_q_BV
        apart_B = torch.mul(p_BV, log_ratio_BV, out=free_BV).sum(-1)
        return apart_B, free_BV.sub_(p_BV.mul_(apart_B.unsqueeze(1)))
    of_p, of_q = math.log1p(-beta), math.log(beta)
    log_m_BV = torch.logaddexp(log_p_BV.add_(of_p), log_q_BV.add_(of_q))
    log_p_over_m_BV = log_p_BV.sub_(log_m_BV).sub_(of_p)
    log_q_over_m_BV = log_q_BV.sub_(log_m_BV).sub_(of_q)
    q_BV = log_m_BV.add_(log_q_over_m_BV).exp_()
    of_q_B = q_BV.mul_(log_q_over_m_BV).sum(-1)
    free_BV = torch.mul(p_BV, log_p_over_m_BV, out=q_BV)
    of_p_B = free_BV.sum(-1)
    du_BV = free_BV.sub_(p_BV.mul_(of_p_B.unsqueeze(1))).mul_(1 - beta)
    return beta * of_q_B + (1 - beta) * of_p_B, du_BV
