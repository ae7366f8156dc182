"""RMSNorm with its own backward: it keeps x and one number per row, where autograd would keep three float32 copies of x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.rms_norm import reference

__all__ = ["rms_norm"]


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """y = weight · x / sqrt(mean(x²) + eps), the mean in float32 whatever x is: in bf16 or fp16 an all-zero row with a tiny eps becomes NaN.

    x [..., D] -> y [..., D] in x's dtype: normalised in float32, rounded, then scaled (the rounding order of the Llama reference).
    Source: Zhang & Sennrich 2019. On CPU in float32 and bf16 one loop over each row, elsewhere plain torch.
    """
    return _RMSNorm.apply(x_TD, weight_D, eps)  # type: ignore[return-value]


def _part(x: Tensor, weight: Tensor) -> Any:
    """Who does the work. The CPU's loops are imported where they are used: numba takes 0.4 s."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16) or weight.dtype != x.dtype:
        return reference
    from unfreeze.kernels.rms_norm import numba_cpu

    return numba_cpu


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x²) + eps), n = x r and g = dy · weight:  dx = r (g - n mean(g n)),  dweight = Σ_T dy n."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        y_TD, r_T1 = _part(x_TD, weight_D).forward(x_TD, weight_D, eps)
        ctx.save_for_backward(x_TD, weight_D, r_T1)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x_TD, weight_D, r_T1 = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = reference.weight_gradient(dy_TD, x_TD, weight_D, r_T1)
        if ctx.needs_input_grad[0]:
            dx = _part(x_TD, weight_D).backward(dy_TD, x_TD, weight_D, r_T1)
        return dx, dweight, None
