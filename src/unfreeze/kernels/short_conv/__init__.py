"""Causal depthwise convolution over a few tokens, which starts anew at each document.

    y_t = f(Σ_{i<K} w_{K-1-i} x_{t-i} + b),  x before the document's first token being 0; f is SiLU or nothing

T tokens, S rows, C channels, K taps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["conv_step", "packed_conv", "tail_of"]


def packed_conv(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, offsets_T: Tensor, silu: bool
) -> Tensor:
    """y [T, C] in x's dtype, computed in float32. offsets_T: place of each token in its document.

    Backward keeps x and computes the sum again.
    """
    return _Packed.apply(x_TC, weight_CK, bias_C, offsets_T, silu)


class _Packed(torch.autograd.Function):
    """With d the gradient of the sum: dx_t = Σ_i w_{K-1-i} d_{t+i} and dw_{K-1-i} = Σ_t d_t x_{t-i}.

    Both only over t + i, t in the document of t, t - i.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, offsets_T: Tensor, silu: bool
    ) -> Tensor:
        ctx.save_for_backward(x_TC, weight_CK, bias_C, offsets_T)
        ctx.silu = silu
        sum_TC = _sum(x_TC, weight_CK, bias_C, offsets_T)
        return (F.silu(sum_TC) if silu else sum_TC).to(x_TC.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_CK, bias_C, offsets_T = ctx.saved_tensors
        d_TC = dy_TC.to(_wide(x_TC))
        if ctx.silu:
            sum_TC = _sum(x_TC, weight_CK, bias_C, offsets_T)
            s_TC = sum_TC.sigmoid()
            d_TC = d_TC * s_TC * (1 + sum_TC * (1 - s_TC))
        K, learns = weight_CK.shape[1], ctx.needs_input_grad[1]
        w_CK, dx_TC = weight_CK.to(d_TC.dtype), torch.zeros_like(d_TC)
        dw_CK = torch.zeros_like(w_CK)
        for i in range(min(K, len(d_TC))):
            own_TC = d_TC[i:] * (offsets_T[i:, None] >= i) if i else d_TC
            dx_TC[: len(own_TC)] += own_TC * w_CK[:, K - 1 - i]
            if learns:
                dw_CK[:, K - 1 - i] = (own_TC * x_TC[: len(own_TC)]).sum(0)
        db_C = d_TC.sum(0).to(bias_C.dtype) if bias_C is not None else None
        return dx_TC.to(x_TC.dtype), dw_CK.to(weight_CK.dtype) if learns else None, db_C, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _sum(x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, offsets_T: Tensor) -> Tensor:
    K, x, w_CK = weight_CK.shape[1], x_TC.to(_wide(x_TC)), weight_CK.to(_wide(x_TC))
    sum_TC = x * w_CK[:, K - 1]
    for i in range(1, min(K, len(x))):
        sum_TC[i:] += x[:-i] * w_CK[:, K - 1 - i] * (offsets_T[i:, None] >= i)
    return sum_TC if bias_C is None else sum_TC.add_(bias_C)


def tail_of(x_TC: Tensor, offsets_T: Tensor, last_S: Tensor, taps: int) -> Tensor:
    """The inputs that the token behind each document needs, [S, taps - 1, C], oldest first; 0 before it."""
    back = torch.arange(taps - 2, -1, -1, device=last_S.device)
    places_SK = last_S[:, None] - back
    inside_SK = offsets_T[last_S][:, None] >= back
    return x_TC[places_SK.clamp(min=0)] * inside_SK[..., None]


def conv_step(
    x_SC: Tensor, window_SKC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """One token per row behind its window [S, K - 1, C] -> (y [S, C], the next window)."""
    every_SKC = torch.cat((window_SKC, x_SC[:, None]), 1)
    sum_SC = (every_SKC.to(_wide(x_SC)) * weight_CK.mT.to(_wide(x_SC))).sum(1)
    if bias_C is not None:
        sum_SC = sum_SC + bias_C
    return (F.silu(sum_SC) if silu else sum_SC).to(x_SC.dtype), every_SKC[:, 1:]
