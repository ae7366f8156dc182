"""A segment of a linear recurrence in chunks: products within a chunk, and one update of the state per chunk.

With G_t the sum of g from the chunk's start to t, and S_0 the state before the chunk:

    u_t = β_t (v_t - exp(G_t) S_0ᵀ k_t) - Σ_{j<t} A_tj u_j,   A_tj = β_t (k_t · exp(G_t - G_j) k_j)
    o_t = S_0ᵀ (exp(G_t) q_t) + Σ_{j<=t} (q_t · exp(G_t - G_j) k_j) u_j
    S_C = exp(G_C) S_0 + Σ_j exp(G_C - G_j) k_j u_jᵀ

The system of u is triangular: u = (I + A)⁻¹ β v - (I + A)⁻¹ β exp(G) k S_0. Without β, u = v.
Every exponent is <= 0, so nothing overflows, whatever the decay.

n chunks, C tokens of a chunk, G key heads, J value heads per key head, k and v widths.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unfreeze.kernels.recurrence.segments import Segment, Segments

if TYPE_CHECKING:
    from unfreeze.kernels.recurrence import Rule


def segment_forward(
    inputs: Sequence[Tensor | None], state: Tensor, segment: Segment, segments: Segments, rule: Rule
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(o [t, H, v], the state of the documents that go on, those of the documents that ended, per step).

    inputs: q, k, v, g, beta of the segment's tokens. state [documents of the first step, H, k, v].
    """
    q_tGk, k_tGk, v_tHv, g, beta_tH = inputs
    assert q_tGk is not None and k_tGk is not None and v_tHv is not None and g is not None
    if rule.normalized:
        q_tGk, k_tGk = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q_tGk, k_tGk))
    n, C, G = segment.chunks, segments.chunk, q_tGk.shape[1]

    def chunks(x: Tensor) -> Tensor:
        """[t, heads, …] -> [n, G, J, C, …]; J = 1 for q and k. Padding is zero: it changes no state."""
        slots = x.new_zeros(n * C, *x.shape[1:]).index_copy(0, segment.slots_t, x)
        return slots.view(n, C, G, -1, *x.shape[2:]).movedim(1, 3)

    q, k, v = chunks(q_tGk * rule.scale), chunks(k_tGk), chunks(v_tHv)
    by_channel = g.dim() == 3
    total = chunks(g).cumsum(3)  # [n, G, J, C] or [n, G, 1, C, k]
    if by_channel:
        qk, kk = decayed_products((q, k), k, total)
        decay = total.exp()
        to_end = (total[..., -1:, :] - total).exp()
        whole = decay[..., -1, :, None]
    else:
        seen = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf).exp()
        qk = (q @ k.mT) * between
        kk = (k @ k.mT) * between if beta_tH is not None else between
        decay = total.exp()[..., None]
        to_end = (total[..., -1:] - total).exp()[..., None]
        whole = decay[..., -1, :, None]
    q_in, k_out = q * decay, k * to_end
    u = v
    forget: Tensor | None = None
    if beta_tH is not None:
        beta = chunks(beta_tH)[..., None]
        system = (beta * kk).tril(-1) + torch.eye(C, dtype=q.dtype, device=q.device)
        width = v.shape[-1]
        right = torch.cat((beta * v, (beta * decay * k).expand(*v.shape[:-1], -1)), -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        u, forget = solved[..., :width], solved[..., width:]
    before, us, after, ended = _through(segment, state, u, forget, k_out, whole)
    o = q_in @ before + qk @ us
    return o.movedim(3, 1).reshape(n * C, -1, o.shape[-1])[segment.slots_t], after, ended


def _through(
    segment: Segment, state: Tensor, u: Tensor, forget: Tensor | None, k_out: Tensor, whole: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The states before the chunks [n, G, J, k, v], u of all chunks, the state behind, those that ended."""
    G, J = u.shape[1:3]
    S = state.unflatten(1, (G, J))
    before, us, ended, begin = [], [], [], 0
    added = k_out.mT @ u if forget is None else None
    counts = (*segment.counts, segment.after)
    for count, following in itertools.pairwise(counts):
        rows = slice(begin, begin + count)
        before.append(S)
        if added is not None:
            S = whole[rows] * S + added[rows]
        else:
            assert forget is not None
            own = u[rows] - forget[rows] @ S
            us.append(own)
            S = whole[rows] * S + k_out[rows].mT @ own
        ended.append(S[following:].detach().flatten(1, 2))
        S, begin = S[:following], begin + count
    return torch.cat(before), torch.cat(us) if us else u, S.flatten(1, 2), ended


def decayed_products(lefts: Sequence[Tensor], right: Tensor, total: Tensor) -> list[Tensor]:
    """P_tj = Σ_c left_tc exp(G_tc - G_jc) right_jc for j <= t, 0 above: [..., C, C] per left.

    G - G could only be split into exp(G_t) exp(-G_j), which overflows. So blocks are halved: between two
    halves, exp(G_t - G_m) exp(G_m - G_j) has a middle m with both exponents <= 0. C is a power of two.
    """
    heads = total.shape[:-1]  # value heads may share a key, and differ in their decay
    out = [(left * right).sum(-1).expand(heads)[..., None, None] for left in lefts]  # [..., C, 1, 1]: j = t
    half, C = 1, right.shape[-2]
    while half < C:
        G, own = (x.unflatten(-2, (-1, 2, half)) for x in (total, right))  # [..., pairs, two halves, h, k]
        middle = G[..., 0, -1:, :]
        shrunk = own[..., 0, :, :] * (middle - G[..., 0, :, :]).exp()
        grown = (G[..., 1, :, :] - middle).exp()
        for index, left in enumerate(lefts):
            below = (left.unflatten(-2, (-1, 2, half))[..., 1, :, :] * grown) @ shrunk.mT
            first, second = out[index].unflatten(-3, (-1, 2)).unbind(-3)
            above = torch.cat((first, torch.zeros_like(below)), -1)
            out[index] = torch.cat((above, torch.cat((below, second), -1)), -2)
        half *= 2
    return [block.squeeze(-3) for block in out]
