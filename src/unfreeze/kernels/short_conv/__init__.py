"""Causal depthwise convolution over a few tokens, which starts anew at each document.

    y_t = f(Σ_{i<K} w_{K-1-i} x_{t-i} + b),  x before the document's first token being 0; f is SiLU or nothing

T tokens, S rows, C channels, K taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.loops.rows import slabs
from unfreeze.kernels.recompute import work_bytes

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
        y_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
        for some in _channels(x_TC):
            sum_Tc = _sum(x_TC, weight_CK, bias_C, offsets_T, some)
            y_TC[:, some] = F.silu(sum_Tc, inplace=True) if silu else sum_Tc
        return y_TC

    @staticmethod
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_CK, bias_C, offsets_T = ctx.saved_tensors
        (T, K), learns = (len(x_TC), weight_CK.shape[1]), ctx.needs_input_grad[1]
        wide = _wide(x_TC)
        dx_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
        dw_CK = torch.zeros_like(weight_CK, dtype=wide)
        db_C = None if bias_C is None else torch.empty_like(bias_C)
        for some in _channels(x_TC):
            d_Tc = dy_TC[:, some].to(wide)
            if ctx.silu:
                sum_Tc = _sum(x_TC, weight_CK, bias_C, offsets_T, some)
                d_Tc = torch.ops.aten.silu_backward(d_Tc, sum_Tc)
                del sum_Tc
            w_cK, dx_Tc = weight_CK[some].to(wide), torch.zeros_like(d_Tc)
            for i in range(min(K, T)):
                own_Tc = d_Tc[i:] * (offsets_T[i:, None] >= i) if i else d_Tc
                dx_Tc[: T - i].addcmul_(own_Tc, w_cK[:, K - 1 - i])
                if learns:
                    dw_CK[some, K - 1 - i] = (own_Tc * x_TC[: T - i, some]).sum(0)
            dx_TC[:, some] = dx_Tc
            if db_C is not None:
                db_C[some] = d_Tc.sum(0)
        return dx_TC, dw_CK.to(weight_CK.dtype) if learns else None, db_C, None, None


def _channels(x_TC: Tensor) -> Iterator[slice]:
    """Blocks of channels, which are independent; four float32 tensors of one fit in `work_bytes`."""
    return slabs(x_TC.shape[1], 16 * len(x_TC), work_bytes(x_TC.device.type))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _sum(x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, offsets_T: Tensor, some: slice) -> Tensor:
    """The sum of these channels, float32 at least."""
    K, x_Tc, w_cK = weight_CK.shape[1], x_TC[:, some].to(_wide(x_TC)), weight_CK[some].to(_wide(x_TC))
    sum_Tc = x_Tc * w_cK[:, K - 1]
    for i in range(1, min(K, len(x_Tc))):
        sum_Tc[i:].addcmul_(x_Tc[:-i] * (offsets_T[i:, None] >= i), w_cK[:, K - 1 - i])
    return sum_Tc if bias_C is None else sum_Tc.add_(bias_C[some])


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
