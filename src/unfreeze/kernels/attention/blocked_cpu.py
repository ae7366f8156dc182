"""Causal attention on CPU for documents of some hundred tokens and more, one block of queries at a time.

A block computes no keys beyond its own last query. torch's CPU flash attention is slower than the GEMMs of
the same cores (`unfreeze kernels list --op attention` shows by how much, per record). Here the products are
GEMMs batched over heads; between them one loop handles a row of scores while it is in cache. Scores are
float32 products of the exact inputs, as in flash; only P and dS are rounded to the inputs' dtype.

S documents of L tokens, H query heads, G key/value heads (H = G · rep), d and v widths. A block has QUERIES
queries of each head; queries and keys are padded with zeros to whole blocks, so that few GEMM shapes occur
(oneDNN compiles one kernel per shape).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.attention import blocked_loops as loops
from unfreeze.kernels.attention.function import CausalAttention, Kernel
from unfreeze.kernels.attention.workspace import QUERIES, shared_out
from unfreeze.kernels.loops import bf16_cpu
from unfreeze.kernels.loops.bf16_tile import COLUMNS
from unfreeze.kernels.loops.cores import spread
from unfreeze.kernels.loops.numba_options import array
from unfreeze.kernels.loops.scratch import scratch
from unfreeze.kernels.recompute import Reuse


class _Heads:
    """Some heads of one document, and the position of their rows in x [S, L, heads, w]."""

    def __init__(self, document: int, length: int, begin: int, groups: int, repeat: int):
        self.document, self.length, self.begin, self.groups, self.repeat = (
            document,
            length,
            begin,
            groups,
            repeat,
        )
        self.blocks = -(-length // QUERIES)

    def plain(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values as scratch [G, blocks · QUERIES, w]."""
        out = scratch(f"attention {name}", (self.groups, self.blocks * QUERIES, x.shape[-1]), dtype, x.device)
        loops.take(
            out.numel(),
            self.groups,
            array(x.flatten(0, 1)),
            self.document * self.length,
            self.length,
            self.begin,
            array(out),
        )
        return out

    def blocked(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Queries, or a tensor of as many rows, as scratch [blocks, G, rep · QUERIES, w]."""
        out = self.empty(name, x.shape[-1], dtype)
        first = self.document * self.length
        loops.take_blocks(
            out.numel(),
            self.blocks * self.groups,
            array(x.flatten(0, 1)),
            first,
            self.length,
            self.begin * self.repeat,
            self.repeat,
            array(out),
        )
        return out

    def empty(self, name: str, width: int, dtype: torch.dtype) -> Tensor:
        return scratch(
            f"attention {name}",
            (self.blocks, self.groups, self.repeat * QUERIES, width),
            dtype,
            torch.device("cpu"),
        )

    def put(self, x: Tensor, out: Tensor) -> None:
        """Write [G, n, w] back to its place in out [S, L, heads, w]."""
        loops.put(
            x.numel(),
            len(x),
            array(x),
            self.document * self.length,
            self.length,
            self.begin,
            array(out.flatten(0, 1)),
        )

    def put_blocks(self, x: Tensor, out: Tensor) -> None:
        first = self.document * self.length
        loops.put_blocks(
            x.numel(),
            self.blocks * self.groups,
            array(x),
            first,
            self.length,
            self.begin * self.repeat,
            self.repeat,
            array(out.flatten(0, 1)),
        )

    def scores(self, name: str, keys: int, dtype: torch.dtype) -> Tensor:
        """Scratch [G, rep · QUERIES, keys]."""
        return scratch(
            f"attention {name}", (self.groups, self.repeat * QUERIES, keys), dtype, torch.device("cpu")
        )


class _Wide:
    """Scores as a batch of float32 GEMMs.

    For float32 inputs, and on CPUs without the instruction of bf16_tile.py.
    """

    def __init__(self, heads: _Heads, q: Tensor, k: Tensor):
        self.heads, self.q, self.k, self.given = (
            heads,
            heads.blocked("q", q, torch.float32),
            heads.plain("k", k, torch.float32),
            (q, k),
        )

    def block(self, b: int, keys: int) -> Tensor:
        """Scores of the queries of block b, [G, rep · QUERIES, keys] float32."""
        return torch.bmm(
            self.q[b], self.k[:, :keys].transpose(1, 2), out=self.heads.scores("scores", keys, torch.float32)
        )

    def narrow(self) -> tuple[Tensor, Tensor]:
        """Queries in blocks, and keys, in the inputs' dtype."""
        q, k = self.given
        if q.dtype == torch.float32:
            return self.q, self.k
        return self.heads.blocked("q narrow", q, q.dtype), self.heads.plain("k narrow", k, k.dtype)


class _Tiled:
    """The same sums from bf16 inputs.

    A product of two bf16 is exact in float32, so widening them first would gain nothing.
    """

    def __init__(self, heads: _Heads, q: Tensor, k: Tensor):
        self.heads, self.q = heads, heads.blocked("q narrow", q, q.dtype)
        self.k = heads.plain("k narrow", k, k.dtype)
        groups, rows, width = self.k.shape
        panels = scratch(
            "attention panels", (groups, rows // COLUMNS, width // 2, COLUMNS), torch.int32, k.device
        )
        self.panels = panels.view(torch.uint32).numpy()
        loops.panels(self.k.numel(), groups, self.k.view(torch.int32).view(torch.uint32).numpy(), self.panels)

    def block(self, b: int, keys: int) -> Tensor:
        out = self.heads.scores("scores", keys, torch.float32)
        loops.scores(
            out.numel(), len(out) * (keys // COLUMNS), array(self.q[b]), self.panels, keys, array(out)
        )
        return out

    def narrow(self) -> tuple[Tensor, Tensor]:
        return self.q, self.k


def _products(heads: _Heads, q: Tensor, k: Tensor) -> _Wide | _Tiled:
    """The object that multiplies the queries of some heads with their keys."""
    tiled = q.dtype == torch.bfloat16 and q.shape[-1] % 2 == 0 and bf16_cpu.panels_pay()
    return (_Tiled if tiled else _Wide)(heads, q, k)


def _each(
    num_documents: int, length: int, groups: int, repeat: int, width: int, work: Callable[[_Heads, int], None]
) -> None:
    """Call work(heads, worker) for all heads of all documents.

    Each core has its own heads; their writes don't overlap.
    """
    pair = groups * repeat * width
    workers, at_once = shared_out(num_documents, length, groups, repeat, pair, torch.get_num_threads())
    jobs = [
        _Heads(document, length, begin, min(groups - begin, at_once), repeat)
        for document in range(num_documents)
        for begin in range(0, groups, at_once)
    ]
    cuts = [worker * len(jobs) // workers for worker in range(workers + 1)]
    spread([jobs[begin:end] for begin, end in itertools.pairwise(cuts)], work)


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return o [S, L, H, v] and the log-sum-exp of each row.

    The latter per document and block for each group's rows: [S, blocks, G, rep · QUERIES] float32.
    """
    S, L, H, _ = q.shape
    G, dtype = k.shape[2], q.dtype
    o, lse = (
        q.new_empty((S, L, H, v.shape[-1])),
        torch.empty((S, -(-L // QUERIES), G, H // G * QUERIES), dtype=torch.float32),
    )

    def work(heads: _Heads, _worker: int) -> None:
        # The heads' queries, keys and values lie H · d apart in memory: gather them side by side for the
        # GEMMs.
        products, values = _products(heads, q, k), heads.plain("v", v, dtype)
        out = heads.empty("o", v.shape[-1], dtype)
        for b in range(heads.blocks):
            # scores = q kᵀ [G, rep · QUERIES, keys]: block b sees the keys up to its own last query
            keys = (b + 1) * QUERIES
            scores = products.block(b, keys)

            # probs = softmax(scale · scores), zero for the keys after each query; in place if dtypes agree
            probs = scores if dtype == torch.float32 else heads.scores("probs", keys, dtype)
            sums = scratch(
                "attention sums", (heads.groups * heads.repeat * QUERIES,), torch.float32, o.device
            )
            loops.softmax(
                scores.numel(),
                scores.shape[0] * scores.shape[1],
                array(scores.flatten(0, 1)),
                b * QUERIES,
                QUERIES,
                np.float32(scale),
                array(probs.flatten(0, 1)),
                array(sums),
            )
            lse[heads.document, b, heads.begin : heads.begin + heads.groups] = sums.view(heads.groups, -1)

            # o = probs v
            torch.bmm(probs, values[:, :keys], out=out[b])
        heads.put_blocks(out, o)

    _each(S, L, G, H // G, q.shape[-1] + v.shape[-1], work)
    return o, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the shapes of q, k, v.

    With P the probabilities: dv = Pᵀ do, dP = do vᵀ, dS = scale · P (dP - Σ do·o), dq = dS k, dk = dSᵀ q.
    """
    S, L, H, _ = q.shape
    G, dtype = k.shape[2], q.dtype
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype) for x in (q, k, v))

    def work(heads: _Heads, _worker: int) -> None:
        products, values = _products(heads, q, k), heads.plain("v", v, dtype)
        queries, keys_ = products.narrow()

        # delta = Σ do · o per query: the term that softmax's backward subtracts, Σ_s P dP, without a pass
        # over P
        do, out = heads.blocked("do", grad, dtype), heads.blocked("o", o, dtype)
        delta = heads.empty("delta", 1, torch.float32)[..., 0]
        loops.dots(do.numel(), heads.blocks * heads.groups, array(do), array(out), array(delta))

        # sum dk and dv over the blocks, in float32
        dq_blocks = heads.empty("dq", q.shape[-1], dtype)
        dk_sum = scratch("attention dk", tuple(keys_.shape), torch.float32, grad.device).zero_()
        dv_sum = scratch("attention dv", tuple(values.shape), torch.float32, grad.device).zero_()
        for b in range(heads.blocks):
            # recompute scores = q kᵀ; dP = do vᵀ
            keys = (b + 1) * QUERIES
            scores = products.block(b, keys)
            dscores = torch.bmm(
                do[b], values[:, :keys].transpose(1, 2), out=heads.scores("dscores", keys, dtype)
            )

            # P = exp(scale · scores - lse); dS = scale · P (dP - delta), over dP
            probs = heads.scores("probs", keys, dtype)
            sums = lse[heads.document, b, heads.begin : heads.begin + heads.groups].flatten()
            flat = [array(x.flatten(0, 1)) for x in (scores, dscores, probs)]
            loops.softmax_backward(
                flat[0].size,
                len(flat[0]),
                flat[0],
                b * QUERIES,
                QUERIES,
                np.float32(scale),
                array(sums),
                array(delta[b].flatten()),
                flat[1],
                flat[2],
            )

            # dv += Pᵀ do, dk += dSᵀ q, dq = dS k
            for total, left, right in ((dv_sum, probs, do[b]), (dk_sum, dscores, queries[b])):
                share = scratch("attention share", (heads.groups, keys, right.shape[-1]), dtype, grad.device)
                torch.bmm(left.transpose(1, 2), right, out=share)
                loops.accumulate(share.numel(), len(share), array(share), array(total))
            torch.bmm(dscores, keys_[:, :keys], out=dq_blocks[b])
        heads.put_blocks(dq_blocks, dq)
        heads.put(dk_sum, dk)
        heads.put(dv_sum, dv)

    _each(S, L, G, H // G, 3 * q.shape[-1] + 2 * v.shape[-1], work)
    return dq, dk, dv


KERNEL = Kernel(_forward, _backward)


def blocked_attention(
    q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, reuse: Reuse | None = None
) -> Tensor:
    """Causal attention inside each of S documents of equal length -> [S, L, H, v].

    float32 or bf16 on CPU; `reuse` as in packed_attention.
    """
    return CausalAttention.apply(q_SLHd, k_SLGd, v_SLGv, scale, reuse, KERNEL)
