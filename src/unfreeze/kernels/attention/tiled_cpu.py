"""Causal attention on CPU in float32: compiled loops over tiles, a query head of a document per job.

torch's CPU flash attention calls the BLAS for each small block, which packs its operands anew. Here keys and
values are packed once per head, and a block of scores is multiplied, exponentiated and multiplied again while
it is in L2 (tiled_loops.py). `unfreeze dev kernels measure --op attention` compares the two.

S documents of L tokens, H query heads, G key/value heads, d and v widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.attention import tiled_loops as loops
from unfreeze.kernels.attention.function import CausalAttention, Kernel
from unfreeze.kernels.attention.tiled_loops import KEYS, QUERIES, SIDE
from unfreeze.kernels.loops.cores import in_runs
from unfreeze.kernels.loops.float_tile import ROWS, WIDTH
from unfreeze.kernels.loops.numba_options import SERIAL, array
from unfreeze.kernels.loops.scratch import scratch
from unfreeze.kernels.recompute import Reuse


def _whole(count: int) -> int:
    """`count` rounded up to whole strips."""
    return -(-count // WIDTH) * WIDTH


def _shapes(length: int, d: int, v: int, *, backward: bool) -> dict[str, tuple[int, ...]]:
    """The buffers of one thread, in the order of tiled_loops.Forward or Backward."""
    L, D, V = _whole(length), _whole(d), _whole(v)
    scores = (QUERIES, KEYS + SIDE)
    if not backward:
        shapes = {"q": (QUERIES, D), "k_T": (L // WIDTH, D, WIDTH), "v": (V // WIDTH, L, WIDTH)}
        return shapes | {"scores": scores, "o": (QUERIES, V), "largest": (QUERIES,), "sums": (QUERIES,)}
    shapes = {"q": (QUERIES, D), "do": (QUERIES, V)}
    shapes |= {"k_T": (L // WIDTH, D, WIDTH), "v_T": (L // WIDTH, V, WIDTH), "k": (D // WIDTH, L, WIDTH)}
    shapes |= {"scores": scores, "dscores": scores}
    shapes |= {"scores_T": (KEYS + SIDE, QUERIES), "dscores_T": (KEYS + SIDE, QUERIES)}
    return shapes | {"dq": (QUERIES, D), "dk": (L + ROWS, D), "dv": (L + ROWS, V)}


def thread_bytes(length: int, d: int, v: int) -> int:
    """Bytes of scratch of one thread; forward and backward share the buffers of the same name."""
    shapes = _shapes(length, d, v, backward=False) | _shapes(length, d, v, backward=True)
    return 4 * sum(math.prod(shape) for shape in shapes.values())


def _buffers(length: int, d: int, v: int, *, backward: bool) -> list[np.ndarray]:
    cpu = torch.device("cpu")
    shapes = _shapes(length, d, v, backward=backward)
    return [array(scratch(f"attention {name}", shape, torch.float32, cpu)) for name, shape in shapes.items()]


def _each(jobs: int, multiply_adds: int, work: Callable[[int, int], object]) -> None:
    """Call work(start, stop) for runs of jobs, one per core unless there is little to do."""
    threads = min(torch.get_num_threads(), jobs) if multiply_adds > 16 * SERIAL else 1
    in_runs(jobs, threads, work)


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o [S, L, H, v] and the log-sum-exp of each row, [S, H, L]."""
    (S, L, H, d), width = q.shape, v.shape[-1]
    o, lse = q.new_empty((S, L, H, width)), q.new_empty((S, H, L))
    arrays = *(array(x) for x in (q, k, v)), np.float32(scale), array(o), array(lse)

    def work(start: int, stop: int) -> None:
        room = loops.Forward(*_buffers(L, d, width, backward=False))
        loops.forward(start, stop, *arrays, room)

    _each(S * H, S * H * L * L * (d + width) // 2, work)
    return o, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes of q, k, v."""
    (S, L, H, d), width, G = q.shape, v.shape[-1], k.shape[2]
    dq, dk, dv = torch.empty_like(q), q.new_empty((S, L, H, d)), q.new_empty((S, L, H, width))
    before = (array(x) for x in (grad, q, k, v, o, lse))
    arrays = *before, np.float32(scale), *(array(x) for x in (dq, dk, dv))

    def work(start: int, stop: int) -> None:
        room = loops.Backward(*_buffers(L, d, width, backward=True))
        loops.backward(start, stop, *arrays, room)

    _each(S * H, S * H * L * L * (3 * d + 2 * width) // 2, work)
    if G == H:
        return dq, dk, dv
    # query heads that share a key: their gradients are summed in the heads' order
    dk, dv = (x.unflatten(2, (G, H // G)).sum(3) for x in (dk, dv))
    return dq, dk, dv


KERNEL = Kernel(_forward, _backward)


def tiled_attention(
    q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, reuse: Reuse | None = None
) -> Tensor:
    """Causal attention inside each of S documents of equal length -> [S, L, H, v].

    float32 on CPU; `reuse` as in packed_attention.
    """
    return CausalAttention.apply(q_SLHd, k_SLGd, v_SLGv, scale, reuse, KERNEL)
