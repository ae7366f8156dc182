"""Training of a learned gate of block attention: its scores follow the mass of full attention on blocks.

    m[t, h, j] = Σ_{s in block j} softmax_s(scale · q[t, h]·k[s, g]),   p = m / Σ_{j < b(t)} m     (constant)
    KL_t       = mean over h of Σ_{j < b(t)} p[j] · (log p[j] - log softmax_{j < b(t)}(score)[j])

b(t) is the token's own block, which is always seen and so has no score. A token with fewer than two earlier
blocks has no choice and KL 0. The mass is that of all earlier blocks, seen or not: a gate learns about
blocks that it does not choose yet. This costs the products of full attention; one slab of queries lives at a
time.
Source: the distillation of SeerAttention, arXiv:2410.13276, 3.2, which follows a block's largest share
instead of its sum.

T tokens, E complete blocks, H query heads, G key heads, r width of the gate; n queries of a slab, N keys
before them in complete blocks, e blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.attention.by_blocks import SCORE_BYTES
from unfreeze.kernels.compressed.entries import Entries
from unfreeze.kernels.moba.choice import Gated, block_scores


def block_divergence(
    gated: Gated, q_THd: Tensor, k_TGd: Tensor, scale: float, entries: Entries, gate_scale: float
) -> Tensor:
    """KL_t [T] in float32 or wider. Its gradient reaches `gated` alone. gate_scale: of the gate's scores."""
    attention = q_THd.detach(), k_TGd.detach(), scale
    return _Divergence.apply(*gated, attention, entries, gate_scale)


@torch.no_grad()
def block_mass(
    q_THd: Tensor, k_TGd: Tensor, scale: float, entries: Entries
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(tokens, their document's blocks, p [n, H, e]) of every slab; blocks from the own one on have 0."""
    for slab in _slabs(entries, q_THd.shape[1]):
        yield slab.queries, slab.blocks, _log_mass(slab, q_THd, k_TGd, scale).exp_()


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THr: Tensor,
        e_EGr: Tensor,
        attention: tuple[Tensor, Tensor, float],
        entries: Entries,
        gate_scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q_THr, e_EGr, *attention[:2])
        ctx.of = attention[2], entries, gate_scale
        kl_T = q_THr.new_zeros(len(q_THr), dtype=torch.promote_types(q_THr.dtype, torch.float32))
        for slab in _slabs(entries, q_THr.shape[1]):
            log_p = _log_mass(slab, *attention)
            apart = log_p - _log_share(slab, q_THr, e_EGr, gate_scale)
            p = log_p.exp()
            kl_T[slab.queries] = torch.where(p > 0, p * apart, 0.0).sum(-1).mean(-1)
        return kl_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        q_THr, e_EGr, q_THd, k_TGd = ctx.saved_tensors
        scale, entries, gate_scale = ctx.of
        wide = torch.promote_types(q_THr.dtype, torch.float32)
        dq, de = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q_THr, e_EGr))
        heads, groups = q_THr.shape[1], e_EGr.shape[1]
        for slab in _slabs(entries, heads):
            # d KL / d score = softmax(score) - p, of each head
            d_nHe = _log_share(slab, q_THr, e_EGr, gate_scale).exp_()
            d_nHe.sub_(_log_mass(slab, q_THd, k_TGd, scale).exp_())
            d_nHe.mul_(grad_T[slab.queries, None, None] * (gate_scale / heads))
            d_GRe = d_nHe.unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2)
            q_GRr = q_THr[slab.queries].to(wide).unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2)
            e_Ger = e_EGr[slab.blocks].to(wide).transpose(0, 1)
            dq_GnJr = (d_GRe @ e_Ger).unflatten(1, (-1, heads // groups))
            dq[slab.queries] = dq_GnJr.transpose(0, 1).flatten(1, 2)
            de[slab.blocks] += (d_GRe.mT @ q_GRr).transpose(0, 1)
        return dq.to(q_THr.dtype), de.to(e_EGr.dtype), None, None, None


class _Slab(NamedTuple):
    """Queries that have earlier blocks; those blocks and their keys. later_n1e: blocks that a query lacks."""

    queries: slice
    blocks: slice
    keys: slice
    later_n1e: Tensor


def _slabs(entries: Entries, heads: int) -> Iterator[_Slab]:
    B = entries.rate
    for rows, theirs in entries.documents:
        length, count = rows.stop - rows.start, theirs.stop - theirs.start
        each = max(1, SCORE_BYTES // (4 * heads * B * max(1, count)))
        for begin in range(2 * B, length, each):  # before, there is no choice
            end = min(begin + each, length)
            seen = (end - 1) // B
            own_n1 = torch.arange(begin, end, device=entries.first_E.device)[:, None] // B
            yield _Slab(
                slice(rows.start + begin, rows.start + end),
                slice(theirs.start, theirs.start + seen),
                slice(rows.start, rows.start + seen * B),
                (torch.arange(seen, device=own_n1.device) >= own_n1)[:, None],
            )


def _log_mass(slab: _Slab, q_THd: Tensor, k_TGd: Tensor, scale: float) -> Tensor:
    """log p [n, H, e]; -inf for blocks that a query lacks."""
    c_nHN = block_scores(q_THd[slab.queries], k_TGd[slab.keys]).mul_(scale)
    m_nHe = c_nHN.unflatten(-1, (slab.later_n1e.shape[-1], -1)).logsumexp(-1)
    return m_nHe.masked_fill_(slab.later_n1e, -torch.inf).log_softmax(-1)


def _log_share(slab: _Slab, q_THr: Tensor, e_EGr: Tensor, gate_scale: float) -> Tensor:
    """log softmax(gate_scale · score) [n, H, e]; -inf for blocks that a query lacks."""
    s_nHe = block_scores(q_THr[slab.queries], e_EGr[slab.blocks]).mul_(gate_scale)
    return s_nHe.masked_fill_(slab.later_n1e, -torch.inf).log_softmax(-1)
