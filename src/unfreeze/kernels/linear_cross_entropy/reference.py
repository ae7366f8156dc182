"""The softmax of one block of logits and its gradient in plain torch. N rows of the block, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_gradient(
    logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """log p, True where no word outscores the target, and the gradient w · (softmax(z) - onehot(target)).

    log p = z[target] - logsumexp(z). The gradient has the dtype of z, and may be in the memory of
    `logits_NV`; if not `wanted` it is undefined. Computed in float32 (float64 in float64).

    logsumexp(z) = max z - log(max softmax(z)): the softmax is needed for the gradient anyway, and a second
    pass of exp would cost as much again (measured, 512 x 8,192 in float32 on one core: softmax 2.9 ms,
    logsumexp 5.2, argmax 3.6, max 0.25).
    """
    exact = torch.promote_types(logits_NV.dtype, torch.float32)
    target_N1 = targets_N.unsqueeze(1)
    probs_NV = logits_NV.softmax(-1, dtype=exact)
    at_N, max_N = logits_NV.gather(1, target_N1).squeeze(1).to(exact), logits_NV.amax(-1).to(exact)
    log_p_N = at_N - max_N + probs_NV.amax(-1).log()
    if wanted:
        probs_NV.scatter_add_(1, target_N1, probs_NV.new_full((1, 1), -1.0).expand_as(target_N1)).mul_(
            weights_N.to(exact).unsqueeze(1)
        )
        logits_NV.copy_(probs_NV)
    return log_p_N, at_N.ge(max_N), logits_NV
