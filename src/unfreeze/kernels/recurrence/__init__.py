"""Linear recurrences over documents: the gated delta rule, KDA, and Mamba-2's state space (SSD).

A head has a state S [k, v], zero where a document begins. Per token, with the decay a = exp(g):

    delta rule   S ← a S,  u = β (v - Sᵀ k),  S ← S + k uᵀ,  o = Sᵀ q
    SSD          S ← a S,  S ← S + k vᵀ,  o = Sᵀ q             (β is None)

g is one number per head (gated delta rule, Mamba-2) or one per head and key channel (KDA); g <= 0. All of it
is in float32. The state is never rounded to a narrower dtype.

Sources: gated delta rule arXiv:2412.06464; KDA arXiv:2510.26692; SSD arXiv:2405.21060; chunks of the delta
rule arXiv:2406.06484.

T tokens, S documents or rows, G key heads, H value heads (a multiple of G), k and v their widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.recompute import Reuse, compute_now
from unfreeze.kernels.recurrence.chunked import carried_bytes, segment_forward, workspace_bytes
from unfreeze.kernels.recurrence.inputs import Inputs, Rule, wide
from unfreeze.kernels.recurrence.segments import Segments

__all__ = [
    "Inputs",
    "Rule",
    "Segments",
    "carried_bytes",
    "final_states",
    "packed_recurrence",
    "recurrence_step",
    "workspace_bytes",
]


def packed_recurrence(inputs: Inputs, segments: Segments, rule: Rule, reuse: Reuse | None = None) -> Tensor:
    """o [T, H, v] in v's dtype.

    Backward keeps the inputs and the state between two segments of a document, and computes the rest again.
    `reuse`: of a layer that is recomputed.
    """
    return _Packed.apply(*inputs, segments, rule, reuse or compute_now)


@torch.no_grad()
def final_states(inputs: Inputs, segments: Segments, rule: Rule) -> tuple[Tensor, Tensor]:
    """(o as packed_recurrence, the state behind each document [S, H, k, v] in float32), without gradients."""
    ended_SHkv = _zeros(inputs, len(segments.last_S))
    o_THv, _ = _forward(inputs, segments, rule, ended_SHkv)
    final_SHkv = torch.empty_like(ended_SHkv)
    final_SHkv[segments.order_S] = ended_SHkv
    return o_THv, final_SHkv


def _forward(
    inputs: Inputs, segments: Segments, rule: Rule, ended_SHkv: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """(o, the states carried from a segment into the next); fills ended: states of documents by `place`."""
    o_THv = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    carried: list[Tensor] = []
    for segment in segments.each:
        state = _zeros(inputs, segment.documents) if segment.begins else carried[-1]
        o_tHv, after = segment_forward(inputs.wide(segment.tokens_t), state, segment, rule)
        o_THv[segment.tokens_t] = o_tHv.to(o_THv.dtype)
        if segment.goes_on:
            carried.append(after)
        elif ended_SHkv is not None:
            ended_SHkv[segment.places] = after
    return o_THv, carried


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TGk: Tensor,
        k_TGk: Tensor,
        v_THv: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor | None,
        segments: Segments,
        rule: Rule,
        reuse: Reuse,
    ) -> Tensor:
        inputs = Inputs(q_TGk, k_TGk, v_THv, g_TH, beta_TH)
        o_THv, carried = reuse(lambda: _forward(inputs, segments, rule))
        ctx.save_for_backward(*inputs, *carried)
        ctx.segments, ctx.rule = segments, rule
        return o_THv

    @staticmethod
    def backward(ctx: Any, do_THv: Tensor) -> tuple[Tensor | None, ...]:
        """Segments from the last to the first; dstate flows from each into the one before."""
        inputs, carried = Inputs(*ctx.saved_tensors[:5]), list(ctx.saved_tensors[5:])
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs.tensors]
        dstate: Tensor | None = None
        for segment in reversed(ctx.segments.each):
            state = _zeros(inputs, segment.documents) if segment.begins else carried.pop()
            own = inputs.wide(segment.tokens_t)
            learnt = [x.requires_grad_() for x in (*own.tensors, state)]
            with torch.enable_grad():
                o_tHv, after = segment_forward(own, state, segment, ctx.rule)
                outputs, arriving = [o_tHv], [do_THv[segment.tokens_t].to(o_tHv.dtype)]
                if dstate is not None:
                    outputs, arriving = [*outputs, after], [*arriving, dstate]
                *parts, dstate = torch.autograd.grad(outputs, learnt, arriving)
            for whole, part in zip(gradients, parts, strict=True):
                whole[segment.tokens_t] = part.to(whole.dtype)
            if segment.begins:
                dstate = None
        return *gradients, *([None] * (5 - len(gradients))), None, None, None


def _zeros(inputs: Inputs, documents: int) -> Tensor:
    v = inputs.v
    return v.new_zeros(documents, v.shape[1], inputs.q.shape[2], v.shape[2], dtype=wide(v))


def recurrence_step(inputs: Inputs, state_SHkv: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """One token per row: (o [S, H, v] in v's dtype, the new state). The formula at the top of this file."""
    q, k, v, g, beta = inputs.wide()
    q, k = ((x.repeat_interleave(v.shape[1] // x.shape[1], 1))[..., None] for x in rule.prepared(q, k))
    state = state_SHkv * g.exp().reshape(*g.shape[:2], -1, 1)
    u = v if beta is None else beta[..., None] * (v - (state * k).sum(-2))
    state = state + k * u[..., None, :]
    return (state * q).sum(-2).to(inputs.v.dtype), state
