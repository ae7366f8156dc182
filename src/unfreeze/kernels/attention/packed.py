"""Causal attention over packed documents: one call per bucket of similar length.

T tokens, N slots of the buckets, S documents of a bucket, L its length, H query heads, G key/value heads (G divides H),
d width of q and k, v width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.attention.layout import Layout

# Blocked against flash, forward and backward, 2,048 tokens, 16 heads of 96 / 64, one Zen 4 core, CPU time: 256 tokens 112 against 156 ms in
# bf16 and 127 against 149 in float32; 512 tokens 153 against 270 and 204 against 288; 128 tokens 78 against 145 and 90 against 87. Below, the
# padding to whole blocks of 128 queries wastes more.
BLOCKED_FROM = 192


class _ToSlots(torch.autograd.Function):
    """x_N = x_T[source_N]. The gradient of padding is exactly zero (no kept query sees it), so backward is a gather, not a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.source_N)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.layout.slot_T), None


class _FromSlots(torch.autograd.Function):
    """x_T = x_N[slot_T]: drops the padding, whose gradient is therefore zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.slot_T)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        layout = ctx.layout
        return grad.new_zeros((layout.num_slots, *grad.shape[1:])).index_copy_(0, layout.slot_T, grad), None


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


def packed_attention(q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, layout: Layout, scale: float, kept: Callable[..., Any] | None = None) -> Tensor:
    """o[t, h] = Σ_s softmax_s(scale · q[t, h]·k[s, g]) v[s, g], g = h·G/H, over s <= t of the same document -> [T, H, v].

    Never attends across documents. v may be narrower than d (MLA: d 192, v 128). No [L, L] scores of all heads are ever held: on CPU documents
    from BLOCKED_FROM tokens on go through blocked_cpu, shorter ones through torch's flash kernel. `kept(compute)`, used on CPU, keeps the
    result at a layer's first visit and gives it back at the second.
    """
    num_tokens = q_THd.shape[0]
    if num_tokens != layout.num_tokens:
        raise ValueError(f"q has {num_tokens} tokens, the layout was built for {layout.num_tokens}")
    if layout.source_N is not None:
        q_THd, k_TGd, v_TGv = (_ToSlots.apply(x, layout) for x in (q_THd, k_TGd, v_TGv))  # type: ignore[misc]
    sizes = [bucket.num_slots for bucket in layout.buckets]
    outputs = []
    for bucket, *parts in zip(layout.buckets, q_THd.split(sizes), k_TGd.split(sizes), v_TGv.split(sizes), strict=True):
        q, k, v = (x.unflatten(0, (bucket.num_documents, bucket.length)) for x in parts)
        if q.device.type != "cpu":
            o = _sdpa(q, k, v, scale)
        elif bucket.length >= BLOCKED_FROM and q.dtype in (torch.float32, torch.bfloat16):
            from unfreeze.kernels.attention.blocked_cpu import blocked_attention  # only the CPU needs numba

            o = blocked_attention(q, k, v, scale, kept)
        else:
            o = _flash_cpu(q, k, v, scale, kept)
        outputs.append(o.flatten(0, 1))
    o_NHv = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return o_NHv if layout.source_N is None else _FromSlots.apply(o_NHv, layout)  # type: ignore[return-value]


def _sdpa(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float) -> Tensor:
    """torch's own choice of kernel. -> [S, L, H, v]."""
    grouped = k_SLGd.shape[2] != q_SLHd.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_SLHd, k_SLGd, v_SLGv))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped).transpose(1, 2)


def _flash_cpu(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, kept: Callable[..., Any] | None) -> Tensor:
    """torch's flash attention, which takes equal widths only: the narrower ones are padded with zeros."""
    width = v_SLGv.shape[-1]
    widest = max(q_SLHd.shape[-1], width)
    q, k, v = (F.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in (q_SLHd, k_SLGd, v_SLGv))
    if kept is None:
        return _sdpa(q, k, v, scale)[..., :width]
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, dim=2) if repeat > 1 else x for x in (k, v))
    o: Tensor = _Kept.apply(*(x.transpose(1, 2) for x in (q, k, v)), scale, kept)  # type: ignore[assignment]
    return o.transpose(1, 2)[..., :width]
