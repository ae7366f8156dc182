"""Sparse attention: an indexer scores all earlier tokens of a document, and attention sees the best K.

    I[t, s] = Σ_j w[t, j] · relu(scale · q[t, j]·k[s])       j the indexer's heads, which share their keys
    S_t     = the K keys s <= t of t's document with the highest I[t, s]; all of them while there are no more

A document of at most K tokens is therefore plain causal attention. Longer ones run by blocks of queries: the
scores of all pairs are never held. Plain torch, on any device, float32 or wider.

The indexer is trained to follow attention, which does not depend on it otherwise. Its loss at token t is

    p_t  = the mean over attention's heads of softmax over S_t       (constant)
    KL_t = Σ_{s in S_t} p_t[s] · (log p_t[s] - log softmax(I[t, S_t])[s])

Source: DeepSeek-V3.2, arXiv:2512.02556, 2.1. Their index runs in FP8 behind a Hadamard rotation, which leaves
products as they are; here it runs in the computation's dtype.

T tokens, L of a document, H attention heads, J indexer heads, i their width, K keys of a query, n queries and
N keys of a block, d and v widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.attention.by_blocks import QUERIES, SCORE_BYTES, attend_by_blocks, hide_, scratch_bytes
from unfreeze.kernels.attention.layout import DocumentLayout
from unfreeze.kernels.packed_attention import packed_attention
from unfreeze.kernels.recompute import Reuse


class Index(NamedTuple):
    """The indexer's view of a token: queries [T, J, i], weights of its heads [T, J], one key [T, i].

    scale: of the products, 1/sqrt(i)
    """

    q_TJi: Tensor
    w_TJ: Tensor
    k_Ti: Tensor
    scale: float


@torch.no_grad()
def index_scores(q_nJi: Tensor, w_nJ: Tensor, k_Ni: Tensor, scale: float) -> Tensor:
    """I [..., n, N] in float32 or wider, without a gradient; dimensions in front of n and N must agree."""
    wide = torch.promote_types(q_nJi.dtype, torch.float32)
    products_nJN = q_nJi.to(wide) @ k_Ni.to(wide).mT.unsqueeze(-3)
    return (w_nJ.to(wide).unsqueeze(-2) @ products_nJN.mul_(scale).relu_()).squeeze(-2)


@torch.no_grad()
def select(index: Index, layout: DocumentLayout, keys: int) -> Tensor:
    """The places in its document that each token sees, int32 [T, K].

    None lies behind the token; one that has fewer than K before it has itself several times. Rows of
    documents of at most K = `keys` tokens are zeros, and nobody reads them.
    """
    chosen_TK = index.k_Ti.new_zeros((len(index.k_Ti), keys), dtype=torch.int32)
    for rows in layout.beyond(keys).longer:
        for begin, end in _blocks(rows.stop - rows.start, index.q_TJi.shape[1]):
            query_n1 = torch.arange(begin, end, device=chosen_TK.device)[:, None]
            if end <= keys:
                best = torch.arange(keys, device=chosen_TK.device)
            else:
                best = _masked_scores(index, rows, begin, end).topk(keys, dim=-1, sorted=False).indices
            block = slice(rows.start + begin, rows.start + end)
            chosen_TK[block] = best.minimum(query_n1).to(torch.int32)
    return chosen_TK


def attend_selected(
    q_THd: Tensor,
    k_THd: Tensor,
    v_THv: Tensor,
    layout: DocumentLayout,
    scale: float,
    chosen_TK: Tensor,
    reuse: Reuse | None = None,
) -> Tensor:
    """Attention of each token to its chosen keys -> [T, H, v]; every head has keys of its own.

    Documents of at most K tokens attend as in packed_attention. `reuse`: of a layer that is recomputed.
    """
    apart = layout.beyond(chosen_TK.shape[1])
    outputs: list[Tensor] = []
    if apart.shorter is not None and apart.rows_N is not None:
        q, k, v = (x.index_select(0, apart.rows_N) for x in (q_THd, k_THd, v_THv))
        outputs.append(packed_attention(q, k, v, apart.shorter, scale, reuse=reuse))
    for rows in apart.longer:
        # some heads at a time, so that the scores of a block stay small
        each = heads_at_once(rows.stop - rows.start)
        parts = zip(*(x[rows].split(each, dim=1) for x in (q_THd, k_THd, v_THv)), strict=True)
        chosen_1LK = chosen_TK[rows][None]
        heads = [
            attend_by_blocks(q[None], k[None], v[None], scale, chosen_SLK=chosen_1LK, reuse=reuse)[0]
            for q, k, v in parts
        ]
        outputs.append(torch.cat(heads, dim=1))
    o_THv = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return o_THv if apart.order_T is None else o_THv.index_select(0, apart.order_T)


def heads_at_once(length: int) -> int:
    """Heads whose scores for one block of queries fit in SCORE_BYTES; at least one."""
    return max(1, SCORE_BYTES // (4 * QUERIES * length))


def selected_bytes(heads: int, width: int, value_width: int, length: int) -> int:
    """Bytes of a block's workspace in backward, for documents of `length`; the chosen keys are left out."""
    few = min(heads, heads_at_once(length))
    return scratch_bytes(few, few, width, value_width, tokens=length, length=length, window=None)


def index_divergence(
    index: Index,
    q_THd: Tensor,
    k_THd: Tensor,
    scale: float,
    layout: DocumentLayout,
    chosen_TK: Tensor | None,
    keys: int,
) -> Tensor:
    """KL_t [T], float32 or wider. Its gradient reaches `index` alone.

    q_THd, k_THd, scale: attention's. chosen_TK: as from `select`; None if no document has more than `keys`.
    """
    attention = q_THd.detach(), k_THd.detach(), scale
    return _Divergence.apply(
        index.q_TJi, index.w_TJ, index.k_Ti, index.scale, attention, layout, chosen_TK, keys
    )


class _Divergence(torch.autograd.Function):
    """Backward computes each block again: one block's scores live at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TJi: Tensor,
        w_TJ: Tensor,
        k_Ti: Tensor,
        index_scale: float,
        attention: tuple[Tensor, Tensor, float],
        layout: DocumentLayout,
        chosen_TK: Tensor | None,
        keys: int,
    ) -> Tensor:
        ctx.save_for_backward(q_TJi, w_TJ, k_Ti, *attention[:2], chosen_TK)
        ctx.scales, ctx.layout, ctx.keys = (index_scale, attention[2]), layout, keys
        kl_T = q_TJi.new_empty(len(q_TJi), dtype=torch.promote_types(q_TJi.dtype, torch.float32))
        index = Index(q_TJi, w_TJ, k_Ti, index_scale)
        for rows, begin, end in _every_block(layout, q_TJi.shape[1]):
            p_nN = _attention_share(*attention, rows, begin, end, chosen_TK, keys)
            log_nN = _log_share(index, rows, begin, end, chosen_TK, keys)
            # where p is 0 its term is, whatever the other side says
            kl_T[rows.start + begin : rows.start + end] = (
                torch.xlogy(p_nN, p_nN).sub_(torch.where(p_nN > 0, p_nN * log_nN, 0.0)).sum(-1)
            )
        return kl_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        q_TJi, w_TJ, k_Ti, q_THd, k_THd, chosen_TK = ctx.saved_tensors
        index_scale, scale = ctx.scales
        wide = torch.promote_types(q_TJi.dtype, torch.float32)
        dq, dw, dk = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q_TJi, w_TJ, k_Ti))
        for rows, begin, end in _every_block(ctx.layout, q_TJi.shape[1]):
            queries, before = slice(rows.start + begin, rows.start + end), slice(rows.start, rows.start + end)
            p_nN = _attention_share(q_THd, k_THd, scale, rows, begin, end, chosen_TK, ctx.keys)
            index = Index(q_TJi, w_TJ, k_Ti, index_scale)
            # dKL/dI = softmax(I) - p, then through I by its formula
            dI_nN = _log_share(index, rows, begin, end, chosen_TK, ctx.keys).exp_().sub_(p_nN)
            dI_nN.mul_(grad_T[queries, None])
            q, w, k = q_TJi[queries].to(wide), w_TJ[queries].to(wide), k_Ti[before].to(wide)
            products_nJN = (q @ k.mT).mul_(index_scale).relu_()
            dw[queries] = (products_nJN @ dI_nN[..., None])[..., 0]
            d_nJN = (products_nJN > 0).to(wide).mul_(dI_nN[:, None]).mul_(w[..., None]).mul_(index_scale)
            dq[queries] = d_nJN @ k
            dk[before] += d_nJN.flatten(0, 1).mT @ q.flatten(0, 1)
        return dq.to(q_TJi.dtype), dw.to(w_TJ.dtype), dk.to(k_Ti.dtype), None, None, None, None, None


def _blocks(length: int, heads: int) -> Iterator[tuple[int, int]]:
    """(first query, end) of each block of a document; the indexer's scores of one fit in SCORE_BYTES."""
    each = max(1, min(QUERIES, SCORE_BYTES // (4 * heads * length)))
    return ((begin, min(begin + each, length)) for begin in range(0, length, each))


def _every_block(layout: DocumentLayout, heads: int) -> Iterator[tuple[slice, int, int]]:
    """(tokens of a document, first query, end) of each block of all documents."""
    ends = (*layout.starts[1:], layout.num_tokens)
    for start, stop in zip(layout.starts, ends, strict=True):
        yield from ((slice(start, stop), begin, end) for begin, end in _blocks(stop - start, heads))


def _masked_scores(index: Index, rows: slice, begin: int, end: int) -> Tensor:
    """I [n, N] of the queries begin:end of a document; -inf for keys behind a query."""
    queries, before = slice(rows.start + begin, rows.start + end), slice(rows.start, rows.start + end)
    I_nN = index_scores(index.q_TJi[queries], index.w_TJ[queries], index.k_Ti[before], index.scale)
    return I_nN.masked_fill_(_behind(begin, end, I_nN.device), -torch.inf)


def _behind(begin: int, end: int, device: torch.device) -> Tensor:
    """bool [n, N]: True for the keys 0:end that lie behind the queries begin:end."""
    return torch.arange(end, device=device) > torch.arange(begin, end, device=device)[:, None]


def _log_share(
    index: Index, rows: slice, begin: int, end: int, chosen_TK: Tensor | None, keys: int
) -> Tensor:
    """log softmax(I[t, S_t]) [n, N]; -inf outside of S_t."""
    I_nN = _masked_scores(index, rows, begin, end)
    if chosen_TK is not None and rows.stop - rows.start > keys:
        hide_(I_nN[None], chosen_TK[rows][None, begin:end])
    return I_nN.log_softmax(-1)


def _attention_share(
    q_THd: Tensor,
    k_THd: Tensor,
    scale: float,
    rows: slice,
    begin: int,
    end: int,
    chosen_TK: Tensor | None,
    keys: int,
) -> Tensor:
    """p [n, N]: the mean over heads of attention's softmax over S_t. It sums to 1 over N."""
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    queries, before = slice(rows.start + begin, rows.start + end), slice(rows.start, rows.start + end)
    heads, p_nN = q_THd.shape[1], torch.zeros((end - begin, end), dtype=wide, device=q_THd.device)
    each = max(1, SCORE_BYTES // (4 * (end - begin) * end))
    for q, k in zip(q_THd[queries].split(each, 1), k_THd[before].split(each, 1), strict=True):
        c_HnN = (q.to(wide).transpose(0, 1) @ k.to(wide).permute(1, 2, 0)).mul_(scale)
        c_HnN.masked_fill_(_behind(begin, end, c_HnN.device), -torch.inf)
        if chosen_TK is not None and rows.stop - rows.start > keys:
            hide_(c_HnN[None], chosen_TK[rows][None, begin:end])
        p_nN += c_HnN.softmax(-1).sum(0)
    return p_nN / heads
