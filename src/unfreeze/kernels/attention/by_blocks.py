"""Attention that torch's flash kernels lack: sliding windows, softcapped scores, sinks, chosen keys.

One block of queries at a time, with only the keys it can see. So no [L, L] scores are ever held, and a window
of W tokens costs L · W, not L². Plain torch, on any device, in float32 (float64 inputs stay float64).

    c = cap · tanh(scale · q kᵀ / cap)         the scores; without a cap scale · q kᵀ
    P = exp(c - lse),   lse = log(Σ_keys exp(c) + exp(sink_h)),   o = P v

A sink is a learned score of each head that takes its share of the softmax and adds nothing to the output.
With chosen keys (kernels/sparse_attention.py) a query sees only K of its document.
Backward recomputes the scores from q, k and lse:

    dP = do vᵀ,   dc = P · (dP - Σ do·o),   d(scale q kᵀ) = dc · (1 - (c / cap)²)
    dsink = -Σ exp(sink - lse) · Σ do·o

Sources: Gemma 2, arXiv:2408.00118, 2; gpt-oss, arXiv:2508.10925, 2.2; FlashAttention-2, arXiv:2307.08691,
2.3.

S documents of L tokens, H query heads, G key/value heads (H = G · rep), d and v widths; N keys of a block.
K chosen keys of a query.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.recompute import Reuse

QUERIES = 128
SCORE_BYTES = 32 << 20  # float32 scores of the documents in flight


class _Scores(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None


def attend_by_blocks(
    q_SLHd: Tensor,
    k_SLGd: Tensor,
    v_SLGv: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    chosen_SLK: Tensor | None = None,
    reuse: Reuse | None = None,
) -> Tensor:
    """Causal attention inside each of S documents of equal length -> [S, L, H, v] in q's dtype.

    window: tokens that a query sees, including itself. softcap: bound of a score. sinks_H: a score per head.
    chosen_SLK: int32, the places in its document that a query sees, none behind it.
    `reuse`: when the layer is recomputed, output and log-sum-exp of the first visit are reused.
    """
    scores = _Scores(scale, window, softcap)
    return _ByBlocks.apply(q_SLHd, k_SLGd, v_SLGv, sinks_H, chosen_SLK, scores, reuse)


def documents_at_once(heads: int, length: int, window: int | None) -> int:
    """Number of documents whose scores for one block of queries fit in SCORE_BYTES; at least one."""
    return max(1, SCORE_BYTES // (4 * heads * QUERIES * _most_keys(length, window)))


def _most_keys(length: int, window: int | None) -> int:
    return min(length, QUERIES + (length if window is None else window - 1))


def scratch_bytes(
    heads: int, key_heads: int, width: int, value_width: int, *, tokens: int, length: int, window: int | None
) -> int:
    """Bytes that backward adds to what attention holds, for documents of `length` among `tokens`.

    For the documents in flight: q, o, do and dq per query head, k, v, dk and dv per key head, in float32; and
    four times the scores of a block (scores, P, dP, and the next one).
    """
    documents = min(max(1, tokens // length), documents_at_once(heads, length, window))
    rows = 2 * heads * (width + value_width) + 2 * key_heads * (width + value_width)
    scores = 4 * heads * QUERIES * _most_keys(length, window)
    return 4 * documents * (length * rows + scores)


class _ByBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
        chosen_SLK: Tensor | None,
        scores: _Scores,
        reuse: Reuse | None,
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            return _forward(q, k, v, sinks_H, chosen_SLK, scores)

        o, lse = compute() if reuse is None else reuse(compute)
        ctx.save_for_backward(q, k, v, sinks_H, chosen_SLK, o, lse)
        ctx.scores = scores
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, chosen_SLK, o, lse = ctx.saved_tensors
        dparts = _backward(grad, q, k, v, sinks_H, chosen_SLK, o, lse, ctx.scores)
        return (*dparts, None, None, None)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, chosen_SLK: Tensor | None, scores: _Scores
) -> tuple[Tensor, Tensor]:
    """o [S, L, H, v] and the log-sum-exp of each query's scores, [S, G, rep, L] in float32."""
    S, L, H, _ = q.shape
    G = k.shape[2]
    compute = torch.promote_types(q.dtype, torch.float32)
    o, lse = q.new_empty((S, L, H, v.shape[-1])), q.new_empty((S, G, H // G, L), dtype=compute)
    for rows in _documents(q, scores.window):
        q_, k_, v_ = (_by_head(x[rows], G, compute) for x in (q, k, v))
        for begin, end, first in _blocks(L, scores.window):
            c = _scores(q_, k_, begin, end, first, scores, _of(chosen_SLK, rows))
            of_block = torch.logsumexp(c, -1)
            if sinks_H is not None:
                of_block = torch.logaddexp(of_block, sinks_H.to(compute).view(G, -1, 1))
            P = c.sub_(of_block[..., None]).exp_()
            out = _times(P, v_[:, :, 0, first:end])
            o[rows, begin:end] = out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
            lse[rows, :, :, begin:end] = of_block
    return o, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    chosen_SLK: Tensor | None,
    o: Tensor,
    lse: Tensor,
    scores: _Scores,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv in the shapes of q, k, v, and the gradient of the sinks."""
    G, L, compute = k.shape[2], q.shape[1], lse.dtype
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dsinks = None if sinks_H is None else sinks_H.new_zeros(sinks_H.shape, dtype=compute)
    for rows in _documents(q, scores.window):
        q_, k_, v_, o_, do_ = (_by_head(x[rows], G, compute) for x in (q, k, v, o, grad))
        delta = (do_ * o_).sum(-1)  # Σ do·o = Σ_keys P dP: the term that softmax's backward subtracts
        if sinks_H is not None and dsinks is not None:
            share = (sinks_H.to(compute).view(G, -1, 1) - lse[rows]).exp()
            dsinks -= (share * delta).sum((0, 3)).flatten()
        dk_, dv_ = torch.zeros_like(k_[:, :, 0]), torch.zeros_like(v_[:, :, 0])
        for begin, end, first in _blocks(L, scores.window):
            # recompute P, then dc = P (dP - delta)
            c = _scores(q_, k_, begin, end, first, scores, _of(chosen_SLK, rows))
            slope = None if scores.softcap is None else 1 - (c / scores.softcap).square_()
            P = c.sub_(lse[rows, :, :, begin:end, None]).exp_()
            do = do_[..., begin:end, :]
            dv_[:, :, first:end] += _flat(P).mT @ _flat(do)
            dc = _times(do, v_[:, :, 0, first:end].mT).sub_(delta[..., begin:end, None]).mul_(P)
            if slope is not None:
                # a masked score is -inf: its P is zero, and so is its gradient
                dc = dc.mul_(slope).masked_fill_(P == 0, 0.0)

            # through scale · q kᵀ
            dc = dc.mul_(scores.scale)
            of_block = _times(dc, k_[:, :, 0, first:end])
            dq[rows, begin:end] = of_block.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
            dk_[:, :, first:end] += _flat(dc).mT @ _flat(q_[..., begin:end, :])
        dk[rows], dv[rows] = dk_.transpose(1, 2).to(k.dtype), dv_.transpose(1, 2).to(v.dtype)
    return dq, dk, dv, None if dsinks is None or sinks_H is None else dsinks.to(sinks_H.dtype)


def _documents(q: Tensor, window: int | None) -> Iterator[slice]:
    at_once = documents_at_once(q.shape[2], q.shape[1], window)
    return (slice(begin, begin + at_once) for begin in range(0, q.shape[0], at_once))


def _blocks(length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first query, end of queries and keys, first key) of each block."""
    for begin in range(0, length, QUERIES):
        first = 0 if window is None else max(0, begin - window + 1)
        yield begin, min(begin + QUERIES, length), first


def _by_head(x: Tensor, groups: int, compute: torch.dtype) -> Tensor:
    """Reshape [S, L, heads, w] -> [S, G, heads / G, L, w], contiguous."""
    return x.to(compute).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).contiguous()


def _flat(x: Tensor) -> Tensor:
    """[S, G, rep, n, w] -> [S, G, rep · n, w]: the heads that share a key become its queries."""
    return x.flatten(2, 3)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """[S, G, rep, n, a] · [S, G, a, b] -> [S, G, rep, n, b]."""
    return (_flat(x) @ matrix).unflatten(2, x.shape[2:4])


def _of(chosen_SLK: Tensor | None, rows: slice) -> Tensor | None:
    return None if chosen_SLK is None else chosen_SLK[rows]


def hide_(c_SHnN: Tensor, chosen_SnK: Tensor) -> Tensor:
    """Set the scores of keys that are not among a query's chosen places to -inf, in place; H: any [S, …]."""
    S, n, N = c_SHnN.shape[0], *c_SHnN.shape[-2:]
    hidden_SnN = torch.ones((S, n, N), dtype=torch.bool, device=c_SHnN.device)
    hidden_SnN.scatter_(-1, chosen_SnK.long(), False)
    between = [1] * (c_SHnN.dim() - 3)
    return c_SHnN.masked_fill_(hidden_SnN.view(S, *between, n, N), -torch.inf)


def _scores(
    q: Tensor, k: Tensor, begin: int, end: int, first: int, scores: _Scores, chosen_SLK: Tensor | None = None
) -> Tensor:
    """c [S, G, rep, n, N] of the queries begin:end and the keys first:end; -inf where none is seen."""
    c = _times(q[..., begin:end, :], k[:, :, 0, first:end].mT).mul_(scores.scale)
    if scores.softcap is not None:
        c = c.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if chosen_SLK is not None:  # none lies behind its query
        return hide_(c, chosen_SLK[:, begin:end])
    query = torch.arange(begin, end, device=q.device)[:, None]
    key = torch.arange(first, end, device=q.device)
    hidden = key > query
    if scores.window is not None:
        hidden |= key <= query - scores.window
    return c.masked_fill_(hidden, -torch.inf)
