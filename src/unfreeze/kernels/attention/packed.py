"""Causal attention over packed documents: one scaled_dot_product_attention call per bucket of similar length.

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

    Never attends across documents. v may be narrower than d (MLA: d 192, v 128): on CPU it is padded with zeros to d, because torch's flash
    kernel there takes equal widths only and the fallback holds [S, H, L, L] scores. `kept(compute)`, used on CPU, keeps the result at a layer's
    first visit and gives it back at the second.
    """
    num_tokens, num_heads, _ = q_THd.shape
    if num_tokens != layout.num_tokens:
        raise ValueError(f"q has {num_tokens} tokens, the layout was built for {layout.num_tokens}")
    v_width = v_TGv.shape[-1]
    if q_THd.device.type == "cpu":
        width = max(q_THd.shape[-1], v_width)
        q_THd, k_TGd, v_TGv = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q_THd, k_TGd, v_TGv))
    if layout.source_N is not None:
        q_THd, k_TGd, v_TGv = (_ToSlots.apply(x, layout) for x in (q_THd, k_TGd, v_TGv))  # type: ignore[misc]

    grouped = k_TGd.shape[1] != num_heads
    sizes = [bucket.num_slots for bucket in layout.buckets]
    outputs = []
    for bucket, q, k, v in zip(layout.buckets, q_THd.split(sizes), k_TGd.split(sizes), v_TGv.split(sizes), strict=True):
        q_SHLd, k_SGLd, v_SGLv = (x.unflatten(0, (bucket.num_documents, bucket.length)).transpose(1, 2) for x in (q, k, v))
        if kept is not None and q.device.type == "cpu":
            if grouped:
                k_SGLd, v_SGLv = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k_SGLd, v_SGLv))
            o_SHLv = _Kept.apply(q_SHLd, k_SGLd, v_SGLv, scale, kept)
        else:
            o_SHLv = F.scaled_dot_product_attention(q_SHLd, k_SGLd, v_SGLv, is_causal=True, scale=scale, enable_gqa=grouped)
        outputs.append(o_SHLv.transpose(1, 2).flatten(0, 1))
    o_NHv = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    o_THv = o_NHv if layout.source_N is None else _FromSlots.apply(o_NHv, layout)
    return o_THv[..., :v_width]  # type: ignore[index]
