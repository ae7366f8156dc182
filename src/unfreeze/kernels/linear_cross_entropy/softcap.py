"""Softcapped logits: y = c · tanh(z / c), dz = dy · (1 - tanh²(z / c)). In float32, rounded once.

Source: Gemma 2, arXiv:2408.00118, section 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """Logits of any shape -> the same within ±cap, in their dtype. Backward keeps the logits."""
    return _Softcap.apply(logits, cap)


def capped(logits: Tensor, cap: float) -> Tensor:
    """The values without autograd, in new memory."""
    return _tanh(logits, cap).mul_(cap).to(logits.dtype)


def through_softcap_(gradient: Tensor, logits: Tensor, cap: float) -> Tensor:
    """d loss / d capped -> d loss / d logits, in the gradient's memory.

    Computed from the logits, not from the capped values: near the cap bf16 leaves nothing of 1 - tanh².
    """
    return gradient.mul_(_tanh(logits, cap).square_().neg_().add_(1))


def _tanh(logits: Tensor, cap: float) -> Tensor:
    """tanh(z / c) in float32 (float64 for float64), a new tensor."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(exact, copy=True).div_(cap).tanh_()


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        ctx.cap = cap
        ctx.save_for_backward(logits)
        return capped(logits, cap)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return through_softcap_(gradient.clone(), logits, ctx.cap), None
