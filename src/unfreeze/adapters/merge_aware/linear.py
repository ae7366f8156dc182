"""A linear layer through its merged weight: y = x Ŵᵀ + b, Ŵ = Q(W + scale · B A).

T rows, R rank, in/out features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.adapters.lora import LowRank
from unfreeze.adapters.merge_aware.codes import FEW, Kept
from unfreeze.adapters.merge_aware.matrix import Lengths, Rounding, product, rounded, rounded_codes
from unfreeze.kernels.expand import expand
from unfreeze.kernels.recompute import Reuse, compute_now
from unfreeze.models.blocks.linear import KeptAdapter, Linear, WithMatrix
from unfreeze.models.blocks.saved import Skip
from unfreeze.quant.codec import Packed


class RoundedLowRank(LowRank, KeptAdapter, WithMatrix):
    """The factors of a LowRank, the same parameters, for a layer that is trained as it will be merged."""

    def __init__(self, adapter: LowRank, rounding: Rounding):
        nn.Module.__init__(self)
        self.rank, self.scale, self.rounding = adapter.rank, adapter.scale, rounding
        self.A, self.B = adapter.A, adapter.B
        self.start = None
        self.codes: Kept[Packed] = Kept()

    def output(self, linear: Linear, x_TI: Tensor, reuse: Reuse | Skip | None) -> Tensor:
        """The layer's whole output (models/blocks/linear.py: WholeAdapter)."""
        if x_TI.shape[:-1].numel() <= FEW and (packed := self.kept(linear)) is not None:
            out = torch.empty(packed.shape, dtype=x_TI.dtype, device=x_TI.device)
            return F.linear(x_TI, expand(packed, None, out), linear.bias)
        base = _base(linear)
        y_TO = _Straight.apply(
            x_TI, self.A, self.B, self.scale, base, self.rounding, compute_now if reuse is None else reuse
        )
        return y_TO if linear.bias is None else y_TO + linear.bias

    def kept(self, linear: Linear) -> Packed | None:
        """Ŵ in its format, for a pass that is only looked at; else None."""
        if not self.codes.wanted:
            return None

        def compute() -> Packed:
            return rounded_codes(_base(linear), product(self.A, self.B, self.scale), self.rounding)

        return self.codes.get((self.A, self.B), (self.scale,), compute)

    def matrix(self, linear: Linear) -> Tensor:
        """Ŵ [out, in] in the layer's dtype (models/blocks/linear.py: WithMatrix)."""
        if (packed := self.kept(linear)) is not None:
            return packed.dequantize().to(linear.dtype)
        return _merged(_base(linear), self.A, self.B, self.scale, self.rounding, linear.dtype)


def _base(linear: Linear) -> Tensor | Packed:
    return linear.weight if linear.codec is None else linear.packed


def _merged(
    base: Tensor | Packed,
    A: Tensor,
    B: Tensor,
    scale: float,
    rounding: Rounding,
    dtype: torch.dtype,
    known: Lengths | None = None,
) -> Tensor:
    out = torch.empty(len(B), A.shape[1], dtype=dtype, device=A.device)
    return rounded(base, product(A, B, scale), rounding, out, known)


class _Straight(torch.autograd.Function):
    """Forward and dx with Ŵ, which is computed in both and not kept.

    forward   y = x Ŵᵀ;  t = scale · x Aᵀ [T, R]
    backward  dx = dy Ŵ;  dA = (scale · dy B)ᵀ x;  dB = dyᵀ t: those of W + scale · B A
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        A_RI: Tensor,
        B_OR: Tensor,
        scale: float,
        base: Tensor | Packed,
        rounding: Rounding,
        reuse: Reuse | Skip,
    ) -> Tensor:
        known: Lengths = {}  # found in forward, used again in backward
        ctx.constants = scale, base, rounding, known
        ctx.save_for_backward(x_TI, A_RI, B_OR)

        def compute() -> Tensor:
            return F.linear(x_TI, _merged(base, A_RI, B_OR, scale, rounding, x_TI.dtype, known))

        y_TO = reuse(compute)
        if y_TO is None:  # nobody reads it
            return x_TI.new_zeros(()).expand(*x_TI.shape[:-1], len(B_OR))
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, A_RI, B_OR = ctx.saved_tensors
        scale, base, rounding, known = ctx.constants
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy_TO @ _merged(base, A_RI, B_OR, scale, rounding, dy_TO.dtype, known)
        dy, x = dy_TO.flatten(0, -2), x_TI.flatten(0, -2)
        a_RI, b_OR = A_RI.to(x.dtype), B_OR.to(x.dtype)
        t_TR, dt_TR = F.linear(x, a_RI).mul_(scale), (dy @ b_OR).mul_(scale)
        dA, dB = (dt_TR.t() @ x).to(A_RI.dtype), (dy.t() @ t_TR).to(B_OR.dtype)
        return dx, dA, dB, None, None, None, None
