"""torch's own attention over documents of one length: runs if no record proves a candidate.

Shapes as in documents.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.attention.sinks import sinks_gradient, take_share_
from unfreeze.kernels.recompute import Reuse, compute_now

FLASH = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes for which torch's CPU flash kernel is used."""


class _FlashReused(torch.autograd.Function):
    """torch's causal flash attention on CPU, with output and log-sum-exp from `reuse`.

    So they are computed at the first visit only. Sinks as in sinks.py.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_SHLd: Tensor,
        k_SHLd: Tensor,
        v_SHLd: Tensor,
        sinks_H: Tensor | None,
        scale: float,
        reuse: Reuse,
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            o_SHLd, lse_SHL = flash(q_SHLd, k_SHLd, v_SHLd, 0.0, True, scale=scale)
            return o_SHLd, lse_SHL if sinks_H is None else take_share_(o_SHLd, lse_SHL, sinks_H)

        o_SHLd, lse_SHL = reuse(compute)
        ctx.save_for_backward(q_SHLd, k_SHLd, v_SHLd, o_SHLd, lse_SHL, sinks_H)
        ctx.scale = scale
        return o_SHLd

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, o_SHLd, lse_SHL, sinks_H = ctx.saved_tensors
        dsinks_H = None if sinks_H is None else sinks_gradient(grad, o_SHLd, lse_SHL, sinks_H)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(grad, *saved, o_SHLd, lse_SHL, 0.0, True, scale=ctx.scale)
        return dq, dk, dv, dsinks_H, None, None


def sdpa(
    q_SLHd: Tensor,
    k_SLGd: Tensor,
    v_SLGv: Tensor,
    scale: float,
    reuse: Reuse | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """As `attend`, by torch's kernels. `reuse` is used on CPU.

    sinks_H: a score per head without a value (by_blocks.py); on a CPU in a dtype of FLASH only. torch's CPU
    flash kernel takes equal widths only (otherwise torch holds all scores), so there the narrower ones are
    padded with zeros. On CUDA no kernel takes grouped keys in float32, and torch would hold all scores
    several times: there each query head gets its own keys.
    """
    if q_SLHd.device.type != "cpu":
        if q_SLHd.dtype not in (torch.bfloat16, torch.float16):
            k_SLGd, v_SLGv = ungrouped(q_SLHd, k_SLGd, v_SLGv)
        return torch_attention(q_SLHd, k_SLGd, v_SLGv, scale)
    width = v_SLGv.shape[-1]
    widest = max(q_SLHd.shape[-1], width)
    q, k, v = (
        F.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in (q_SLHd, k_SLGd, v_SLGv)
    )
    if q.dtype not in FLASH:
        return torch_attention(q, k, v, scale)[..., :width]
    # the same operations with and without `reuse`, so recomputation changes no bit of a gradient; torch's own
    # function sums the gradients of grouped keys in another order
    k, v = ungrouped(q, k, v)
    o: Tensor = _FlashReused.apply(
        *(x.transpose(1, 2) for x in (q, k, v)), sinks_H, scale, reuse or compute_now
    )
    return o.transpose(1, 2)[..., :width]


def ungrouped(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated per query head."""
    repeat = q_SLHd.shape[2] // k_SLGd.shape[2]
    if repeat == 1:
        return k_SLGd, v_SLGv
    return k_SLGd.repeat_interleave(repeat, dim=2), v_SLGv.repeat_interleave(repeat, dim=2)


def torch_attention(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float) -> Tensor:
    """torch's function on unmodified tensors. -> [S, L, H, v]."""
    grouped = k_SLGd.shape[2] != q_SLHd.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_SLHd, k_SLGd, v_SLGv))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped).transpose(
        1, 2
    )
