"""RMSNorm, forward and backward written out: autograd would keep three fp32 copies of x per norm, this keeps x and one number per row.

T rows, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = weight · x / sqrt(mean(x²) + eps), the mean in fp32 whatever x is: in bf16 or fp16 an all-zero row with a tiny eps becomes NaN.

    Source: Zhang & Sennrich 2019; rounding order (normalise in fp32, round, then scale) as in the Llama reference.
    """

    def __init__(self, size: int, eps: float, *, dtype: Any, device: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return _RMSNorm.apply(x_TD, self.weight, self.eps)  # type: ignore[return-value]


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x²) + eps), n = x r and g = dy · weight:  dx = r (g - n mean(g n)),  dweight = Σ_T dy n."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        x32 = x_TD.float()
        r_T1 = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_TD, weight_D, r_T1)
        return weight_D * (x32 * r_T1).to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x_TD, weight_D, r_T1 = ctx.saved_tensors
        n_TD = x_TD.float().mul_(r_T1)
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dy_TD.float() * n_TD).flatten(0, -2).sum(0).to(weight_D.dtype)
        if ctx.needs_input_grad[0]:
            g_TD = dy_TD.float() * weight_D.float()
            dx = g_TD.sub_(n_TD.mul_((g_TD * n_TD).mean(-1, keepdim=True))).mul_(r_T1).to(x_TD.dtype)
        return dx, dweight, None
