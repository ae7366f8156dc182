"""RMSNorm in plain torch: the oracle, and what runs where no faster candidate does. T rows, D width."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r [T, 1] float32)."""
    x32 = x_TD.float()
    r_T1 = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight_D * (x32 * r_T1).to(x_TD.dtype), r_T1


def backward(dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, r_T1: Tensor) -> Tensor:
    """dx = r (g - n mean(g n)), g = dy · weight, n = x r."""
    n_TD = x_TD.float() * r_T1
    g_TD = dy_TD.float() * weight_D.float()
    return g_TD.sub_(n_TD.mul_((g_TD * n_TD).mean(-1, keepdim=True))).mul_(r_T1).to(x_TD.dtype)


def weight_gradient(dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, r_T1: Tensor) -> Tensor:
    """dweight = Σ_T dy n, summed in float32."""
    return (dy_TD.float() * (x_TD.float() * r_T1)).flatten(0, -2).sum(0).to(weight_D.dtype)
