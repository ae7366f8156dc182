"""RMSNorm in plain torch: the oracle; it runs if no faster candidate does. T rows, D width."""

from __future__ import annotations

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    """At least float32; float64 stays float64, so that this file is its own oracle."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def forward(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r [T, 1] in at least float32)."""
    x32 = _wide(x_TD)
    r_T1 = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight_D * (x32 * r_T1).to(x_TD.dtype)).to(x_TD.dtype), r_T1


def backward(dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, r_T1: Tensor) -> Tensor:
    """dx = r (g - n mean(g n)), g = dy · weight, n = x r."""
    n_TD = _wide(x_TD) * r_T1
    g_TD = _wide(dy_TD) * _wide(weight_D)
    return g_TD.sub_(n_TD.mul_((g_TD * n_TD).mean(-1, keepdim=True))).mul_(r_T1).to(x_TD.dtype)


def weight_gradient(dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, r_T1: Tensor) -> Tensor:
    """dweight = Σ_T dy n, summed in at least float32."""
    return (_wide(dy_TD) * (_wide(x_TD) * r_T1)).flatten(0, -2).sum(0).to(weight_D.dtype)
