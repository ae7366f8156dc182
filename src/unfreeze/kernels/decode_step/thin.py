"""The low-rank part of an operation, y += scale · B t with t = A x: of one adapter, or of each row's own.

A slot is the number of an adapter. Two tables, which may change between steps, say what a row has: slots
int64 [S], -1 for none, and in a table of the matrix the ENTRY bytes of each slot,

    address of A   address of B   rank R   scale (a float32, in the low half)

all 0 where the slot leaves this matrix as it is. A [.., R, K] and B [.., O, R] are float32.
Arguments as in ops.py.
"""

from __future__ import annotations

import numpy as np

from unfreeze.kernels.decode_step.atomic import every, floats, integers
from unfreeze.kernels.decode_step.codes import CHUNK
from unfreeze.kernels.decode_step.dots import FLOAT32
from unfreeze.kernels.decode_step.pointer import Callee, call_products
from unfreeze.kernels.decode_step.rows import copy, dot, pack
from unfreeze.kernels.loops.numba_options import inlined, inner

NUMBERS = 3
FRESH, CACHED = 1, 4  # `step` of products (tiles.py): weights come from memory, or were just read
ENTRY = 32  # bytes
ZERO, ONE = np.int64(0), np.int64(1)  # not literals, for which numba compiles a loop anew


@inner
def add_thin(tile, kind, B, first, count, height, rank, low, low_stride, n, scale, sums):
    """sums[j · count + k] += scale · B[first + k] · t_j for `count` of B's `height` rows, and n rows t.

    All in float32: t is not rounded, whatever the other products do. It is packed with zeros up to whole
    chunks, because a chunk of a narrow B reaches into its next rows. So the last rows, behind which nothing
    may be read, are taken one by one; so are all if tile is 0.
    """
    like = np.float32(0.0)
    stride = rank * (4 if kind == FLOAT32 else 2)
    whole = (rank + CHUNK - 1) // CHUNK * CHUNK
    behind = (whole - 1) // rank
    tiled = max(0, min(count, height - behind - first)) if tile else 0
    if tiled:
        row, packed = np.zeros(whole, np.float32), np.empty(4 * whole, np.float32)
        xs, out = np.empty(4, np.int64), np.empty(4 * tiled, np.float32)
        for j in range(4):
            xs[j] = packed.ctypes.data + 4 * whole * min(j, n - 1)
        for j in range(n):
            copy(floats(low + j * low_stride, rank), row[:rank])
            pack(like, row, ZERO, xs[j])
        call_products(
            tile, like, tiled, CACHED, B + first * stride, stride, 0, 0, 0, 0, whole, xs.ctypes.data, n,
            out.ctypes.data,
        )  # fmt: skip
        for j in range(n):
            for k in range(tiled):
                sums[j * count + k] += scale * out[j * tiled + k]
        packed[0] = out[0]  # both live until here: their addresses are all that the products have
    for j in range(n):
        t = floats(low + j * low_stride, rank)
        for k in range(tiled, count):
            sums[j * count + k] += scale * dot(kind, t, B + (first + k) * stride)


@inlined
def of_slot(slots, table, row):
    """-> A, B, R, scale of that row's adapter; four zeros if it has none."""
    slot = integers(slots, row + 1)[row]
    if slot < 0:
        return 0, 0, 0, np.float32(0.0)
    entry = integers(table + ENTRY * slot, 3)
    return entry[0], entry[1], entry[2], floats(table + ENTRY * slot + 24, 1)[0]


@inlined
def same_slot(slots, tokens, first, end):
    """Rows from `first` on, at most 4 and before `end`, whose sequences have the same slot.

    tokens: int64, the sequence of each row; 0: row and sequence have the same number.
    """
    count = 1
    while count < 4 and first + count < end:
        mine, next_ = first, first + count
        if tokens:
            mine, next_ = integers(tokens, end)[mine], integers(tokens, end)[next_]
        if integers(slots, mine + 1)[mine] != integers(slots, next_ + 1)[next_]:
            break
        count += 1
    return count


@inner
def add_of_slots(
    tile, slots, table, tokens, begin, n, matrix, half, first, count, height, low, low_stride, sums
):
    """add_thin with each row's own adapter, for the n rows from `begin` on.

    matrix: its number in a stack. low: t of row 0. half: 1 where t follows that of another matrix.
    """
    j = 0
    while j < n:
        row = begin + j
        together = same_slot(slots, tokens, row, begin + n)
        _, B, rank, scale = of_slot(slots, table, integers(tokens, row + 1)[row] if tokens else row)
        if B:
            B += matrix * height * rank * 4
            t = low + row * low_stride + 4 * half * rank
            add_thin(
                tile, FLOAT32, B, first, count, height, rank, t, low_stride, together, scale,
                sums[j * count :],
            )  # fmt: skip
        j += together


@Callee
def thin_of_slots(like, job, rows, arguments, numbers):
    """t = A x of row `job`, with its own adapter; nothing without one."""
    a = every(arguments)
    tile, slots, table, x, x_stride, width, out, out_stride = a[:8]
    A, _, rank, _ = of_slot(slots, table, job)
    if A:
        xs = np.empty(4, np.int64)
        xs[:] = x + job * x_stride
        call_products(
            tile, like, rank, FRESH, A, 4 * width, 0, 0, 0, 0, width, xs.ctypes.data, 1,
            out + job * out_stride,
        )  # fmt: skip
