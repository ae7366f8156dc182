"""Causal attention over packed documents: one call per bucket of similar length.

T tokens, N slots of the buckets, S documents of a bucket, L its length, H query heads, G key/value heads (G divides H),
d width of q and k, v width of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.attention.documents import Kept, attend
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


def packed_attention(
    q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, layout: Layout, scale: float, kept: Kept | None = None, impl: str = "auto"
) -> Tensor:
    """o[t, h] = Σ_s softmax_s(scale · q[t, h]·k[s, g]) v[s, g], g = h·G/H, over s <= t of the same document -> [T, H, v].

    Never attends across documents. v may be narrower than d (MLA: d 192, v 128). No [L, L] scores of all heads are ever held.
    `kept` and `impl` as in attend.
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
        outputs.append(attend(q, k, v, scale, kept, impl).flatten(0, 1))
    o_NHv = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return o_NHv if layout.source_N is None else _FromSlots.apply(o_NHv, layout)  # type: ignore[return-value]
