"""The student as corrector of a frozen teacher: maximise the likelihood of both together.

Both form a product of experts, p ∝ p_T · p_S^γ. The teacher never changes, so it may be one that cannot be
trained here; the student only learns where the teacher is wrong. generate/joint.py samples from both.

Product of experts: Hinton, Neural Computation 14 (2002), 1771. Proxy-tuning (arXiv:2401.08565) corrects a
large model this way when it samples, by the change that tuning made in a small one; here the small one is
trained for it.

T tokens of a step, N supervised ones, B rows of a block, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch, Loss
    from unfreeze.objectives.divergence import LogProbs, Teacher


def corrector(
    hidden_TD: Tensor,
    lm_head: nn.Module,
    batch: Batch,
    teacher: Teacher,
    *,
    gamma: float = 1.0,
    vocab: int | None = None,
    block_rows: int | None = None,
) -> Loss:
    """Return sum_t w_t · -log r_t[target_t],  r_t = softmax(log p_T + γ log p_S).

    p_S is the student, p_T the teacher, both over the first `vocab` ids (None: all of the student's).
    gamma    γ of the student. 0: r is the teacher, and the loss is the teacher's, without a gradient. With γ
             = 1 and a uniform teacher, r is the student and the loss is cross entropy.
    metrics  sums of w_t: "teacher" -log p_T[target_t], "correct" if no token of r outscores the target.
    By the student's logits z the gradient is w · γ · (r - onehot(target)). It reaches hidden_TD and the
    trainable parts of lm_head. The logits of all rows are never in memory at once, for either model
    (kernels/linear_cross_entropy).

    Assumption: the teacher gives every target a probability above 0. Otherwise the loss is infinite, because
    no correction can compensate.
    """
    import torch

    from unfreeze.core.batch import Loss
    from unfreeze.kernels.linear_cross_entropy import sums_through_head
    from unfreeze.objectives.divergence import divergence_rows

    rows_N = batch.supervised()
    weights_N = batch.weights_T.index_select(0, rows_N)
    with torch.no_grad():
        log_q = teacher(batch)
    hidden_ND = hidden_TD.index_select(0, rows_N)
    words = int(lm_head.out_features)  # type: ignore[arg-type]
    sums = _Joint(
        log_q,
        batch.targets_T.index_select(0, rows_N),
        weights_N.to(torch.promote_types(hidden_ND.dtype, torch.float32)),
        min(vocab or words, words),
        gamma,
    )
    trained = any(parameter.requires_grad for parameter in lm_head.parameters())
    # alive at once: the logits, log p_S, log r and softmax, like forward KL
    size = block_rows or divergence_rows(
        len(hidden_ND), words, hidden_ND.dtype, hidden_ND.device, trained, beta=0
    )
    total, alone, correct = sums_through_head(hidden_ND, lm_head, sums, size)
    each = None if torch.is_grad_enabled() else batch.per_document(sums.each_N.double())
    return Loss(sum=total, count=weights_N.sum(), metrics={"teacher": alone, "correct": correct}, each=each)


class _Joint:
    """The sums of `corrector` (kernels/linear_cross_entropy/blocks.py: Sums)."""

    def __init__(self, log_q: LogProbs, targets_N: Tensor, weights_N: Tensor, vocab: int, gamma: float):
        self.log_q, self.targets_N, self.weights_N = log_q, targets_N, weights_N
        self.vocab, self.gamma = vocab, gamma
        self.dtype = weights_N.dtype
        self.total, self.alone, self.correct = (weights_N.new_zeros(()) for _ in range(3))
        self.each_N = weights_N.new_zeros(len(weights_N))

    def add(self, logits_BV: Tensor, rows: slice, wanted: bool) -> Tensor:
        from unfreeze.kernels.linear_cross_entropy.reference import softmax_gradient
        from unfreeze.objectives.divergence import log_softmax

        weights_B, targets_B = self.weights_N[rows], self.targets_N[rows]
        log_p_BV = log_softmax(logits_BV[:, : self.vocab], 1, self.dtype)
        joint_BV = self.log_q(rows, log_p_BV)
        self.alone -= (joint_BV.gather(1, targets_B.unsqueeze(1)).squeeze(1) * weights_B).sum()
        joint_BV = joint_BV.add_(log_p_BV, alpha=self.gamma) if self.gamma else joint_BV
        del log_p_BV

        # log p_S is z minus a number per row, so the gradient by z is γ times the gradient by the summed
        # logits
        log_r_B, wins_B, gradient_BV = softmax_gradient(joint_BV, targets_B, self.gamma * weights_B, wanted)
        self.each_N[rows] = -log_r_B * weights_B
        self.total -= (log_r_B * weights_B).sum()
        self.correct += (wins_B * weights_B).sum()
        if wanted:
            logits_BV.zero_()
            logits_BV[:, : self.vocab] = gradient_BV
        return logits_BV

    def totals(self) -> tuple[Tensor, ...]:
        return self.total, self.alone, self.correct
