"""The autograd function that the CPU implementations of attention share.

S documents of L tokens, H query heads, G key/value heads, d and v widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.recompute import Reuse


class Kernel(NamedTuple):
    """An implementation, on contiguous tensors.

    forward   q [S, L, H, d], k [S, L, G, d], v [S, L, G, v], scale -> o [S, L, H, v], the log-sum-exp of rows
    backward  do, q, k, v, o, that log-sum-exp, scale -> dq, dk, dv
    """

    forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


class CausalAttention(torch.autograd.Function):
    """o = softmax(scale · q kᵀ) v by a `Kernel`; saves q, k, v, o and the log-sum-exp, no scores.

    reuse: of a layer that is recomputed; o and the log-sum-exp of its first visit are taken.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, reuse: Reuse | None, kernel: Kernel
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()

        def compute() -> tuple[Tensor, Tensor]:
            return kernel.forward(q, k, v, scale)

        o, lse = compute() if reuse is None else reuse(compute)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale, ctx.kernel = scale, kernel
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.kernel.backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None)
