"""Causal attention on CPU for documents of some hundred tokens and more: a block of queries at a time against all keys it may see.

torch's CPU flash attention runs at 70 GFLOP/s on two cores whose GEMMs do 400 in bf16 and 160 in float32 (Zen 4, 512 tokens, width 96). Here
the products are GEMMs over a batch of heads, and what stands between them is one loop over a row of scores while it is in cache. Scores are
float32 products of the exact inputs, as flash computes them; only P and dS are rounded to the inputs' dtype.

S documents of L tokens, H query heads, G key/value heads (H = G · rep), d and v widths. A block has ROWS queries of each head; queries and keys
are padded with zeros to whole blocks, so that few GEMM shapes occur (oneDNN compiles one kernel per shape).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from unfreeze.kernels.numba_options import Kernel, array, exp, narrow, widen
from unfreeze.kernels.scratch import scratch

ROWS = 128  # queries of a block: the half block above the diagonal that is computed in vain is 1/8 of the work at L = 512
SCORE_BYTES = 8 << 20  # float32 scores of the heads worked on at once
LANES = 16


@numba.njit
def _largest(row):
    lanes = np.full(LANES, -np.inf, np.float32)
    whole = row.size // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            lanes[j] = max(lanes[j], row[i + j])
    for i in range(whole, row.size):
        lanes[0] = max(lanes[0], row[i])
    largest = lanes[0]
    for j in range(1, LANES):
        largest = max(largest, lanes[j])
    return largest


@numba.njit
def _exponentials(row, scale, shift):
    """row[i] = exp(scale · row[i] - shift); their sum."""
    lanes = np.zeros(LANES, np.float32)
    whole = row.size // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            e = exp(np.float32(np.float32(scale * row[i + j]) - shift))
            row[i + j] = e
            lanes[j] += e
    for i in range(whole, row.size):
        e = exp(np.float32(np.float32(scale * row[i]) - shift))
        row[i] = e
        lanes[0] += e
    total = np.float32(0.0)
    for j in range(LANES):
        total += lanes[j]
    return total


@Kernel
def _softmax(scores, first, rows, scale, probs, lse):
    """probs[r, :] = softmax of scale · scores[r, : first + r % rows + 1], zero behind; lse[r] its log-sum-exp. scores are overwritten."""
    for r in prange(scores.shape[0]):
        seen = first + r % rows + 1
        row, target = scores[r, :seen], probs[r]
        shift = np.float32(scale * _largest(row))
        total = _exponentials(row, scale, shift)
        lse[r] = np.float32(shift + np.float32(np.log(total)))
        share = np.float32(np.float32(1.0) / total)
        for i in range(seen):
            target[i] = narrow(np.float32(row[i] * share), target[i])
        target[seen:] = 0


@Kernel
def _softmax_backward(scores, first, rows, scale, lse, delta, dprobs, probs):
    """probs = P as in _softmax; dprobs becomes dS = scale · P (dP - delta)."""
    for r in prange(scores.shape[0]):
        seen = first + r % rows + 1
        row, p, d = scores[r], probs[r], dprobs[r]
        shift, off = lse[r], delta[r]
        for i in range(seen):
            e = exp(np.float32(np.float32(scale * row[i]) - shift))
            p[i] = narrow(e, p[i])
            d[i] = narrow(np.float32(np.float32(scale * e) * np.float32(widen(d[i]) - off)), d[i])
        p[seen:] = 0
        d[seen:] = 0


def _padded(name: str, source: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """[l, G, ...] -> scratch [G, ..., length, width]: heads first, rows padded with zeros."""
    heads_first = source.movedim(0, -2)
    out = scratch(f"attention {name}", (*heads_first.shape[:-2], length, heads_first.shape[-1]), dtype, source.device)
    out[..., : source.shape[0], :].copy_(heads_first)
    out[..., source.shape[0] :, :].zero_()
    return out


def _parts(length: int, groups: int, repeat: int) -> Iterator[slice]:
    """Groups of heads whose scores fit SCORE_BYTES."""
    at_once = max(1, SCORE_BYTES // (4 * repeat * ROWS * length))
    for begin in range(0, groups, at_once):
        yield slice(begin, min(groups, begin + at_once))


class _Block:
    """ROWS queries from `first` on of some heads of one document: q float32, and their scores against the keys up to the diagonal."""

    def __init__(self, q_LGrd: Tensor, k32_GLd: Tensor, first: int):
        self.first, self.rows = first, slice(first, min(first + ROWS, q_LGrd.shape[0]))
        self.keys, self.count = first + ROWS, q_LGrd.shape[1] * q_LGrd.shape[2] * ROWS
        self.q = _padded("q", q_LGrd[self.rows], ROWS, torch.float32).flatten(1, 2)
        self.scores = self.space("scores", torch.float32)
        torch.bmm(self.q, k32_GLd[:, : self.keys].transpose(1, 2), out=self.scores)

    def space(self, name: str, dtype: torch.dtype) -> Tensor:
        """[G, rep · ROWS, keys]."""
        return scratch(f"attention {name}", (*self.q.shape[:2], self.keys), dtype, self.q.device)

    def back(self, x_GRw: Tensor, repeat: int) -> Tensor:
        """[G, rep · ROWS, w] -> [rows, G, rep, w], without the padding."""
        return x_GRw.unflatten(1, (repeat, ROWS))[:, :, : self.rows.stop - self.first].permute(2, 0, 1, 3)


def _forward(q_SLGrd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o [S, L, G, rep, v] and the log-sum-exp [S, L, G, rep] float32."""
    num_documents, length, groups, repeat, _ = q_SLGrd.shape
    dtype, padded = q_SLGrd.dtype, -(-length // ROWS) * ROWS
    o = q_SLGrd.new_empty((*q_SLGrd.shape[:-1], v_SLGv.shape[-1]))
    lse = torch.empty(q_SLGrd.shape[:-1], dtype=torch.float32)
    for s in range(num_documents):
        for part in _parts(padded, groups, repeat):
            k32, v = _padded("k", k_SLGd[s, :, part], padded, torch.float32), _padded("v", v_SLGv[s, :, part], padded, dtype)
            for first in range(0, length, ROWS):
                block = _Block(q_SLGrd[s, :, part], k32, first)
                probs = block.scores if dtype == torch.float32 else block.space("probs", dtype)
                sums = scratch("attention lse", (len(k32), repeat * ROWS, 1), torch.float32, o.device)
                flat = (block.scores.flatten(0, 1), probs.flatten(0, 1))
                _softmax(flat[0].numel(), array(flat[0]), first, ROWS, np.float32(scale), array(flat[1]), array(sums.view(-1)))
                out = scratch("attention o", (*probs.shape[:2], v.shape[-1]), dtype, o.device)
                o[s, block.rows, part].copy_(block.back(torch.bmm(probs, v[:, : block.keys], out=out), repeat))
                lse[s, block.rows, part].copy_(block.back(sums, repeat)[..., 0])
    return o, lse


def _backward(grad: Tensor, q_SLGrd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, o: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes of q, k, v. With P the probabilities: dv = Pᵀ do, dP = do vᵀ, dS = scale · P (dP - Σ do·o), dq = dS k, dk = dSᵀ q."""
    num_documents, length, groups, repeat, _ = q_SLGrd.shape
    dtype, padded = q_SLGrd.dtype, -(-length // ROWS) * ROWS
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype) for x in (q_SLGrd, k_SLGd, v_SLGv))
    delta = (grad.float() * o.float()).sum(-1, keepdim=True)
    for s in range(num_documents):
        for part in _parts(padded, groups, repeat):
            k32, v = _padded("k", k_SLGd[s, :, part], padded, torch.float32), _padded("v", v_SLGv[s, :, part], padded, dtype)
            k = k32 if dtype == torch.float32 else _padded("k narrow", k_SLGd[s, :, part], padded, dtype)
            dk_sum = scratch("attention dk", tuple(k32.shape), torch.float32, grad.device).zero_()
            dv_sum = scratch("attention dv", tuple(v.shape), torch.float32, grad.device).zero_()
            for first in range(0, length, ROWS):
                block = _Block(q_SLGrd[s, :, part], k32, first)
                do = _padded("do", grad[s, block.rows, part], ROWS, dtype).flatten(1, 2)
                sums, off = (_padded(n, x[s, block.rows, part], ROWS, torch.float32) for n, x in (("lse", lse[..., None]), ("delta", delta)))
                dscores, probs = torch.bmm(do, v[:, : block.keys].transpose(1, 2), out=block.space("dscores", dtype)), block.space("probs", dtype)
                flat = [array(x.flatten(0, 1)) for x in (block.scores, dscores, probs)]
                shifts = (array(sums.view(-1)), array(off.view(-1)))
                _softmax_backward(flat[0].size, flat[0], first, ROWS, np.float32(scale), *shifts, flat[1], flat[2])
                q = block.q if dtype == torch.float32 else _padded("q narrow", q_SLGrd[s, block.rows, part], ROWS, dtype).flatten(1, 2)
                for sum_, left, right in ((dv_sum, probs, do), (dk_sum, dscores, q)):
                    share = scratch("attention share", (len(k32), block.keys, right.shape[-1]), dtype, grad.device)
                    sum_[:, : block.keys] += torch.bmm(left.transpose(1, 2), right, out=share)
                out = scratch("attention o", (*dscores.shape[:2], k.shape[-1]), dtype, grad.device)
                dq[s, block.rows, part].copy_(block.back(torch.bmm(dscores, k[:, : block.keys], out=out), repeat))
            dk[s, :, part].copy_(dk_sum[:, :length].transpose(0, 1))
            dv[s, :, part].copy_(dv_sum[:, :length].transpose(0, 1))
    return dq, dk, dv


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, kept: Callable[..., Any] | None) -> Tensor:  # type: ignore[override]
        grouped = q.unflatten(2, (k.shape[2], -1))
        o, lse = _forward(grouped, k, v, scale) if kept is None else kept(lambda: _forward(grouped, k, v, scale))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.scale = scale
        return o.flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = _backward(grad.unflatten(2, o.shape[2:4]), q.unflatten(2, o.shape[2:4]), k, v, o, lse, ctx.scale)
        return dq.flatten(2, 3), dk, dv, None, None


def blocked_attention(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, kept: Callable[..., Any] | None = None) -> Tensor:
    """Causal attention inside each of S documents of equal length -> [S, L, H, v]. float32 or bf16 on CPU; `kept` as in packed_attention."""
    return _Blocked.apply(q_SLHd, k_SLGd, v_SLGv, scale, kept)  # type: ignore[return-value]
