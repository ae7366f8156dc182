"""The part of a document that blocked_cpu.py processes at once; the memory for it, and for tiled_cpu.py.

L tokens in blocks of QUERIES, H query heads, G key/value heads (H = G · rep), d and v widths.
"""

from __future__ import annotations

import torch

from unfreeze.kernels.attention.documents import OP, bucket_of
from unfreeze.kernels.choice.choose import by_record
from unfreeze.kernels.loops import bf16_cpu

# queries of a block: the wasted half block above the diagonal is 1/8 of the work at L = 512
QUERIES = 128
SCORE_BYTES = 8 << 20  # float32 scores of the heads in flight
# multiply-adds of a call from which heads are divided among cores; less work is not worth handing out
SPREAD_FROM = 1 << 26


def shared_out(
    documents: int, length: int, groups: int, repeat: int, multiply_adds: int, threads: int
) -> tuple[int, int]:
    """(workers, key/value heads that one processes at once).

    As many heads as have scores within SCORE_BYTES; multiply_adds: of one pair of tokens, all heads.
    """
    workers = threads if documents * length**2 * multiply_adds >= SPREAD_FROM else 1
    at_once = min(groups, max(1, SCORE_BYTES // (4 * repeat * QUERIES * length)))
    if documents < workers:  # then workers share a document's heads
        at_once = min(at_once, -(-groups // workers))
    return min(workers, documents * -(-groups // at_once)), at_once


def workspace_bytes(
    heads: int,
    key_heads: int,
    width: int,
    value_width: int,
    *,
    tokens: int,
    length: int,
    dtype: torch.dtype,
    threads: int,
) -> int:
    """Bytes of scratch that backward takes for documents of `length` among `tokens`; forward takes less.

    "tiled": the buffers of each worker (tiled_cpu.py).
    "blocked", for the heads of each worker: a block's scores, dP and P; q, k, v, o, do and dq, with bf16 also
    q and k as the GEMM takes them; dk, dv and their increments. 0 if the reference runs, which has no blocks.
    """
    narrow = dtype != torch.float32
    runs = by_record(OP, torch.device("cpu"), dtype, bucket_of(length, width, value_width)).runs
    if runs == "tiled":
        from unfreeze.kernels.attention.tiled_cpu import thread_bytes  # numba, which other plans do without

        return min(threads, heads * max(1, tokens // length)) * thread_bytes(length, width, value_width)
    if runs != "blocked":
        return 0
    groups, repeat, size = key_heads, heads // key_heads, dtype.itemsize
    multiply_adds = groups * repeat * (3 * width + 2 * value_width)
    documents = max(1, tokens // length)
    workers, at_once = shared_out(documents, length, groups, repeat, multiply_adds, threads)

    keys = -(-length // QUERIES) * QUERIES
    queries = repeat * keys
    scores = repeat * QUERIES * keys * (4 + 2 * size)
    rows = queries * (2 * width * size + 2 * value_width * size + 4)  # q, dq; o, do; Σ do · o
    rows += keys * (width + value_width) * size  # k, v
    rows += keys * ((width + value_width) * 4 + max(width, value_width) * size)  # dk, dv, their increments
    if narrow and bf16_cpu.panels_pay():
        rows += keys * width * size  # k in the instruction's order
    elif narrow:
        rows += (queries + keys) * width * 4  # q and k in float32
    return workers * at_once * (scores + rows)
