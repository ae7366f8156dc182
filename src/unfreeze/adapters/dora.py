"""DoRA: the length and the direction of each row of a weight are trained apart.

    W' = m ⊙ (W + ΔW) / ‖W + ΔW‖        m [out] starts at ‖W‖; norms are those of rows; ΔW = scale · B A
    y  = x W'ᵀ + b

The norm is a constant in backward. Source: Liu et al. 2024, arXiv:2402.09353, section 4.3; as in peft.

It is computed without W + ΔW, from a thin product that costs as much as `rank` more rows of x:

    ‖W + ΔW‖² = ‖W‖² + 2 scale Σ_r (W Aᵀ) ⊙ B + scale² Σ_r (B (A Aᵀ)) ⊙ B

‖W‖² is computed once. In float32 the norm's relative error is about 1e-7 · ‖W‖² / ‖W + ΔW‖²: it grows only
for a row that ΔW all but cancels.

T rows, R rank, in/out features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.lora import LowRank
from unfreeze.kernels.loops.rows import slabs
from unfreeze.kernels.recompute import Reuse
from unfreeze.models.blocks.linear import Linear, WithMatrix
from unfreeze.models.blocks.saved import Skip

SLAB_BYTES = 32 << 20  # of the float32 rows that are summed at once


class Dora(LowRank, WithMatrix):
    """The factors of ΔW, and m fp32 [out]: the length of each row of W'.

    At `scale` 0 the layer is the base's; at f times its own scale, m / ‖W + ΔW‖ is f times as far from 1 (the
    receipt amplifies an adapter so).
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, scale: float, device: torch.device | str = "cpu"
    ):
        super().__init__(in_features, out_features, rank, scale, device)
        self.own_scale = scale
        self.m = nn.Parameter(torch.zeros(out_features, dtype=torch.float32, device=device))
        self._squares: Tensor | None = None  # ‖W‖² of each row; W is frozen
        self._kept: tuple[list[tuple[int, int]], Tensor] | None = None

    @torch.no_grad()
    def begin(self, linear: Linear) -> None:
        """Set m to ‖W‖: the layer's output is the base's, as long as ΔW is zero."""
        self.m.copy_(self._squares_of(linear).sqrt())

    def output(self, linear: Linear, x_TI: Tensor, reuse: Reuse | Skip | None) -> Tensor:
        """x W'ᵀ + b."""

        def kept(compute: Any) -> Any:  # the gradient of m needs x (W + ΔW)ᵀ, also where nobody reads y again
            z = None if reuse is None else reuse(compute)
            return compute() if z is None else z

        z_TO = linear.with_factors(x_TI, self.factors(), None, kept)
        return _Lengthened.apply(z_TO, self.gain(linear), linear.bias)

    def gain(self, linear: Linear) -> Tensor:
        """m / ‖W + ΔW‖, float32 [out]; gradients reach m alone."""
        gain_O = self.m / self.norm(linear)
        if self.scale == self.own_scale:
            return gain_O
        return 1 + (self.scale / self.own_scale) * (gain_O - 1)

    def matrix(self, linear: Linear) -> Tensor:
        """W' [out, in] in the layer's dtype."""
        A_RI, B_OR, scale = self.factors()
        change = (B_OR @ A_RI).mul(scale).to(linear.dtype)
        return (linear.matrix() + change) * self.gain(linear)[:, None].to(linear.dtype)

    @torch.inference_mode(False)  # what is kept may train later
    @torch.no_grad()
    def norm(self, linear: Linear) -> Tensor:
        """‖W + ΔW‖ of each row at the adapter's own scale, float32 [out].

        Kept until A or B changes: a step of generation would else read W twice.
        """
        now = [(tensor.data_ptr(), tensor._version) for tensor in (self.A, self.B)]
        if self._kept and self._kept[0] == now:
            return self._kept[1]
        A_RI, B_OR, _ = self.factors()
        # bf16 in, bf16 out on a GPU: an error of 2^-9 of ΔW's part alone
        exact = linear.codec is None and A_RI.device.type == "cpu"
        low_OR = linear.product(A_RI if exact else A_RI.to(linear.dtype)).float().t()
        norm_O = row_norms(self._squares_of(linear), low_OR, A_RI, B_OR, self.own_scale)
        self._kept = now, norm_O
        return norm_O

    def _squares_of(self, linear: Linear) -> Tensor:
        if self._squares is None:
            self._squares = row_squares(linear.weight if linear.codec is None else linear.matrix())
        return self._squares.to(self.m.device)


@torch.no_grad()
def row_squares(weight_OI: Tensor) -> Tensor:
    """‖W‖² of each row, float32 [out], some rows at a time."""
    squares_O = torch.empty(len(weight_OI), dtype=torch.float32, device=weight_OI.device)
    for rows in slabs(len(weight_OI), 8 * weight_OI.shape[1], SLAB_BYTES):
        squares_O[rows] = torch.linalg.vector_norm(weight_OI[rows].float(), dim=1).square()
    return squares_O


def row_norms(squares_O: Tensor, low_OR: Tensor, A_RI: Tensor, B_OR: Tensor, scale: float) -> Tensor:
    """‖W + scale · B A‖ of each row, from ‖W‖² and W Aᵀ."""
    across_O = (low_OR * B_OR).sum(1)
    own_O = ((B_OR @ (A_RI @ A_RI.t())) * B_OR).sum(1)
    whole_O = squares_O + 2 * scale * across_O + scale**2 * own_O
    return whole_O.clamp_min(torch.finfo(torch.float32).tiny).sqrt()


class _Lengthened(torch.autograd.Function):
    """y = z ⊙ g + b; the sum over tokens in g's gradient is float32."""

    @staticmethod
    def forward(ctx: Any, z_TO: Tensor, gain_O: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(z_TO, gain_O)
        y_TO = torch.mul(z_TO, gain_O, out=torch.empty_like(z_TO))
        return y_TO if bias is None else y_TO.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        z_TO, gain_O = ctx.saved_tensors
        dz = dgain = None
        if ctx.needs_input_grad[0]:
            dz = torch.mul(dy_TO, gain_O, out=torch.empty_like(dy_TO))
        if ctx.needs_input_grad[1]:
            dy, z = dy_TO.flatten(0, -2), z_TO.flatten(0, -2)
            dgain = torch.zeros_like(gain_O)
            for rows in slabs(len(dy), 8 * dy.shape[1], SLAB_BYTES):
                dgain += (dy[rows].float() * z[rows]).sum(0)
        return dz, dgain, dy_TO.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
