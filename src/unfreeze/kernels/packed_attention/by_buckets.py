"""Causal attention over packed documents by one call per bucket of similar length: the reference.

Documents are gathered into rectangles first, and their results are gathered back.

T tokens, N slots of the buckets, S documents of a bucket, L its length, H query heads, G key/value heads (G
divides H), d width of q and k, v width of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.attention.by_blocks import attend_by_blocks
from unfreeze.kernels.attention.documents import attend
from unfreeze.kernels.attention.form import CAUSAL, Mask
from unfreeze.kernels.attention.layout import DocumentLayout
from unfreeze.kernels.attention.sdpa import FLASH, sdpa
from unfreeze.kernels.recompute import Reuse


class _ToSlots(torch.autograd.Function):
    """x_N = x_T[source_N].

    The gradient of padding is exactly zero (no real query sees it), so backward is a gather, not a
    scatter-add.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source_N: Tensor, slot_T: Tensor) -> Tensor:
        ctx.slot_T = slot_T
        return x.index_select(0, source_N)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.slot_T), None, None


class _FromSlots(torch.autograd.Function):
    """x_T = x_N[slot_T]: drops the padding, whose gradient is therefore zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_T: Tensor) -> Tensor:
        ctx.num_slots, ctx.slot_T = x.shape[0], slot_T
        return x.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros((ctx.num_slots, *grad.shape[1:])).index_copy_(0, ctx.slot_T, grad), None


def by_buckets(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    layout: DocumentLayout,
    scale: float,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    reuse: Reuse | None = None,
) -> Tensor:
    """As packed_attention. [L, L] scores of all heads are never held.

    A softcap, or a window shorter than a document, runs by blocks of queries (attention/by_blocks.py). Sinks
    do too, except on a CPU, where torch's flash kernel takes them.
    """
    source_N, slot_T = layout.source_N, layout.slot_T
    if source_N is not None and slot_T is not None:
        q_THd, k_TGd, v_TGv = (_ToSlots.apply(x, source_N, slot_T) for x in (q_THd, k_TGd, v_TGv))
    sizes = [bucket.num_slots for bucket in layout.buckets]
    outputs = []
    for bucket, *parts in zip(
        layout.buckets, q_THd.split(sizes), k_TGd.split(sizes), v_TGv.split(sizes), strict=True
    ):
        q, k, v = (x.unflatten(0, (bucket.num_documents, bucket.length)) for x in parts)
        window = mask.window if mask.window is not None and mask.window < bucket.length else None
        if window is None and softcap is None and sinks_H is None:
            o_SLHv = attend(q, k, v, scale, reuse)
        elif window is None and softcap is None and q.device.type == "cpu" and q.dtype in FLASH:
            o_SLHv = sdpa(q, k, v, scale, reuse, sinks_H)
        else:
            o_SLHv = attend_by_blocks(
                q, k, v, scale, window=window, softcap=softcap, sinks_H=sinks_H, reuse=reuse
            )
        outputs.append(o_SLHv.flatten(0, 1))
    o_NHv = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return o_NHv if slot_T is None else _FromSlots.apply(o_NHv, slot_T)
