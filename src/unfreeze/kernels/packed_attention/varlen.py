"""Causal attention over packed documents in one call: nothing is gathered, and keys are not repeated.

A flash kernel for documents of any lengths (FlashAttention-2, arXiv:2307.08691) reads the bounds of documents
from a tensor. It is passed in as two functions: torch's (flash_cuda.py), in tests plain torch. It takes equal
widths only, so narrower values (MLA) are padded with zeros inside forward and backward, where nothing of the
padding is kept. Sinks as in attention/sinks.py.

T tokens, S documents, H query heads, G key/value heads (G divides H), d width of q and k, v <= d width of
values.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.attention.form import CAUSAL, Mask
from unfreeze.kernels.attention.layout import DocumentLayout
from unfreeze.kernels.attention.sinks import sinks_gradient, take_share_
from unfreeze.kernels.choice.op import Implementation
from unfreeze.kernels.recompute import Reuse, compute_now


class Documents(NamedTuple):
    """The other arguments of a call.

    bounds_S1  int32 [S + 1], document s is the tokens bounds[s]:bounds[s + 1]
    longest    tokens of the longest one
    window     tokens that a query sees, including itself; None: all of its document up to itself
    """

    bounds_S1: Tensor
    longest: int
    scale: float
    window: int | None


class VarlenFunctions(Protocol):
    """The module of a kernel. All widths are d."""

    def forward(
        self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, documents: Documents, /
    ) -> tuple[Tensor, Tensor]:
        """(o [T, H, d] in new memory, log-sum-exp of each query's scores [H, T], at least float32)."""
        ...

    def backward(
        self,
        do_THd: Tensor,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGd: Tensor,
        o_THd: Tensor,
        lse_HT: Tensor,
        documents: Documents,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); o and the log-sum-exp are used as P = exp(scores - lse) and Σ do·o only."""
        ...


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGv: Tensor,
        sinks_H: Tensor | None,
        documents: Documents,
        functions: VarlenFunctions,
        reuse: Reuse,
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            width = v_TGv.shape[-1]
            o_THv, lse_HT = functions.forward(q_THd, k_TGd, _wide(v_TGv, q_THd), documents)
            if width < o_THv.shape[-1]:
                o_THv = o_THv[..., :width].contiguous()  # a view would keep the padding alive
            if sinks_H is not None:
                lse_HT = take_share_(o_THv.transpose(0, 1), lse_HT, sinks_H)
            return o_THv, lse_HT

        o_THv, lse_HT = reuse(compute)
        ctx.save_for_backward(q_THd, k_TGd, v_TGv, o_THv, lse_HT, sinks_H)
        ctx.documents, ctx.functions = documents, functions
        return o_THv

    @staticmethod
    def backward(ctx: Any, do_THv: Tensor) -> tuple[Tensor | None, ...]:
        q_THd, k_TGd, v_TGv, o_THv, lse_HT, sinks_H = ctx.saved_tensors
        dsinks_H = None
        if sinks_H is not None and ctx.needs_input_grad[3]:
            dsinks_H = sinks_gradient(do_THv.transpose(0, 1), o_THv.transpose(0, 1), lse_HT, sinks_H)
        do, v, o = (_wide(x, q_THd) for x in (do_THv, v_TGv, o_THv))
        dq, dk, dv = ctx.functions.backward(do, q_THd, k_TGd, v, o, lse_HT, ctx.documents)
        return dq, dk, dv[..., : v_TGv.shape[-1]], dsinks_H, None, None, None


def _wide(x: Tensor, q_THd: Tensor) -> Tensor:
    """x with zeros up to q's width."""
    missing = q_THd.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def by(functions: VarlenFunctions) -> Implementation:
    """packed_attention (without softcap), computed by `functions`."""

    def by_varlen(
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
        if softcap is not None:
            raise ValueError("flash kernels of torch have no softcap")
        longest = layout.longest
        window = mask.window if mask.window is not None and mask.window < longest else None
        documents = Documents(layout.bounds(q_THd.device), longest, scale, window)
        return _Varlen.apply(q_THd, k_TGd, v_TGv, sinks_H, documents, functions, reuse or compute_now)

    return by_varlen
