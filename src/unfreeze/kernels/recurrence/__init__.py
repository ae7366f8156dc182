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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.recompute import Reuse, compute_now
from unfreeze.kernels.recurrence.chunked import segment_forward
from unfreeze.kernels.recurrence.segments import CHUNK, SLOTS, Segments

__all__ = ["Rule", "Segments", "final_states", "packed_recurrence", "recurrence_step", "workspace_bytes"]


class Rule(NamedTuple):
    """scale: factor of q. normalized: q and k are divided by their length first, sqrt(Σ x² + 1e-6)."""

    scale: float = 1.0
    normalized: bool = False


def packed_recurrence(
    q_TGk: Tensor,
    k_TGk: Tensor,
    v_THv: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor | None,
    segments: Segments,
    rule: Rule,
    reuse: Reuse | None = None,
) -> Tensor:
    """o [T, H, v] in v's dtype.

    g_TH [T, H] or [T, H, k] float32; beta_TH [T, H] or None. Backward keeps the inputs and a state per
    segment but the first, and computes the rest again. `reuse`: of a layer that is recomputed.
    """
    return _Packed.apply(q_TGk, k_TGk, v_THv, g_TH, beta_TH, segments, rule, reuse or compute_now)


def final_states(
    q_TGk: Tensor,
    k_TGk: Tensor,
    v_THv: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor | None,
    segments: Segments,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """(o as packed_recurrence, the state after each document [S, H, k, v] in float32), without gradients."""
    with torch.no_grad():
        o_THv, _, ended = _forward((q_TGk, k_TGk, v_THv, g_TH, beta_TH), segments, rule, final=True)
    final = torch.empty_like(ended)
    final[segments.order_S] = ended
    return o_THv, final


def _forward(
    inputs: tuple[Tensor | None, ...], segments: Segments, rule: Rule, *, final: bool
) -> tuple[Tensor, list[Tensor], Tensor]:
    """(o, the state before each segment but the first, the last states of the documents if `final`)."""
    q_TGk, _, v_THv, *_ = inputs
    assert q_TGk is not None and v_THv is not None
    o_THv = torch.empty_like(v_THv, memory_format=torch.contiguous_format)
    state = _zeros(q_TGk, v_THv, segments.each[0].documents)
    states, ended = [state], torch.empty_like(state) if final else state
    for segment in segments.each:
        own = _of(inputs, segment.tokens_t)
        o_tHv, after = segment_forward(own, states[-1], segment, segments, rule)
        o_THv[segment.tokens_t] = o_tHv.to(o_THv.dtype)
        states.append(after[: segment.after])
        if final:
            ended[segment.after : segment.documents] = after[segment.after :]
    return o_THv, states[1:-1], ended


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
        inputs = (q_TGk, k_TGk, v_THv, g_TH, beta_TH)
        o_THv, states = reuse(lambda: _forward(inputs, segments, rule, final=False)[:2])
        ctx.save_for_backward(*(x for x in inputs if x is not None), *states)
        ctx.segments, ctx.rule, ctx.num = segments, rule, len(inputs) - (beta_TH is None)
        return o_THv

    @staticmethod
    def backward(ctx: Any, do_THv: Tensor) -> tuple[Tensor | None, ...]:
        """Segments from the last to the first; dstate flows from each to the one before."""
        inputs, states = ctx.saved_tensors[: ctx.num], ctx.saved_tensors[ctx.num :]
        first = _zeros(inputs[0], inputs[2], ctx.segments.each[0].documents)
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        dstate: Tensor | None = None
        for segment, state in zip(reversed(ctx.segments.each), (*reversed(states), first), strict=True):
            own = [x.requires_grad_() for x in _of(inputs, segment.tokens_t)]
            padded = [*own, None] if len(own) == 4 else own
            with torch.enable_grad():
                state = state.detach().requires_grad_()
                o_tHv, after = segment_forward(padded, state, segment, ctx.segments, ctx.rule)
                outputs, arriving = [o_tHv], [do_THv[segment.tokens_t].to(o_tHv.dtype)]
                if dstate is not None:
                    outputs, arriving = [*outputs, after[: segment.after]], [*arriving, dstate]
                *d_own, dstate = torch.autograd.grad(outputs, [*own, state], arriving)
            for whole, part in zip(gradients, d_own, strict=True):
                whole[segment.tokens_t] = part.to(whole.dtype)
        none = (None,) if len(gradients) == 4 else ()
        return *gradients, *none, None, None, None


def workspace_bytes(G: int, H: int, k: int, v: int, device: str, *, by_channel: bool = False) -> int:
    """Bytes that backward of a segment adds: float32 tensors per slot, counted in segment_forward.

    Per value head: 6 [v] and 6 [k] rows, and 5 rows of a chunk's products; per key head 6 [k] rows, with a
    decay per channel 24 and their gradients; each twice, with its gradient.
    """
    products = 5 * CHUNK if not by_channel else 12 * CHUNK
    return 8 * SLOTS[device] * (H * (6 * v + 6 * k + products) + G * k * (24 if by_channel else 6))


def _of(inputs: Any, tokens_t: Tensor) -> list[Any]:
    """The rows of these tokens, in float32 at least (float64 for tests)."""
    return [
        None if x is None else x.detach()[tokens_t].to(torch.promote_types(x.dtype, torch.float32))
        for x in inputs
    ]


def _zeros(q_TGk: Tensor, v_THv: Tensor, rows: int) -> Tensor:
    dtype = torch.promote_types(v_THv.dtype, torch.float32)
    return v_THv.new_zeros(rows, v_THv.shape[1], q_TGk.shape[2], v_THv.shape[2], dtype=dtype)


def recurrence_step(
    q_SGk: Tensor,
    k_SGk: Tensor,
    v_SHv: Tensor,
    g_SH: Tensor,
    beta_SH: Tensor | None,
    state_SHkv: Tensor,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """One token per row: (o [S, H, v] in v's dtype, the new state). The formula at the top of this file."""
    q, k, v, g = (x.to(state_SHkv.dtype) for x in (q_SGk, k_SGk, v_SHv, g_SH))
    if rule.normalized:
        q, k = unit(q), unit(k)
    each = v.shape[1] // q.shape[1]
    q, k = ((x.repeat_interleave(each, 1))[..., None] for x in (q * rule.scale, k))
    state = state_SHkv * g.exp().reshape(*g.shape[:2], -1, 1)
    u = v
    if beta_SH is not None:
        u = beta_SH.to(v.dtype)[..., None] * (v - (state * k).sum(-2))
    state = state + k * u[..., None, :]
    return (state * q).sum(-2).to(v_SHv.dtype), state


def unit(x: Tensor) -> Tensor:
    """x / sqrt(Σ x² + 1e-6): the length that Qwen's and Kimi's kernels divide by."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
