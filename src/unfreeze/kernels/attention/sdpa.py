"""torch's own attention over documents of one length: what runs where no record proves a candidate. Shapes as in documents.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _Kept(torch.autograd.Function):
    """torch's causal flash attention on CPU, whose output and log-sum-exp come from `kept`: computed at the first visit only."""

    @staticmethod
    def forward(ctx: Any, q_SHLd: Tensor, k_SHLd: Tensor, v_SHLd: Tensor, scale: float, kept: Callable[..., Any]) -> Tensor:  # type: ignore[override]
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o_SHLd, lse_SHL = kept(lambda: flash(q_SHLd, k_SHLd, v_SHLd, 0.0, True, scale=scale))
        ctx.save_for_backward(q_SHLd, k_SHLd, v_SHLd, o_SHLd, lse_SHL)
        ctx.scale = scale
        return o_SHLd

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return (*backward(grad, *ctx.saved_tensors, 0.0, True, scale=ctx.scale), None, None)


def sdpa(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, kept: Callable[..., Any] | None = None) -> Tensor:
    """As `attend`, by F.scaled_dot_product_attention; torch chooses the kernel. `kept` is used on CPU.

    torch's CPU flash kernel takes equal widths only (else it holds all scores), so there the narrower ones are padded with zeros.
    """
    if q_SLHd.device.type != "cpu":
        return plain(q_SLHd, k_SLGd, v_SLGv, scale)
    width = v_SLGv.shape[-1]
    widest = max(q_SLHd.shape[-1], width)
    q, k, v = (F.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in (q_SLHd, k_SLGd, v_SLGv))
    if kept is None:
        return plain(q, k, v, scale)[..., :width]
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, dim=2) if repeat > 1 else x for x in (k, v))
    o: Tensor = _Kept.apply(*(x.transpose(1, 2) for x in (q, k, v)), scale, kept)  # type: ignore[assignment]
    return o.transpose(1, 2)[..., :width]


def plain(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float) -> Tensor:
    """torch's function on tensors as they are. -> [S, L, H, v]."""
    grouped = k_SLGd.shape[2] != q_SLHd.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_SLHd, k_SLGd, v_SLGv))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped).transpose(1, 2)
