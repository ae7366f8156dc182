"""Products of a step with many rows, by the CPU's matrix unit (loops/amx_tile.py).

The loop `linear` reads a matrix once and multiplies row by row: the time of a few rows is that of reading. A
matrix unit multiplies 16 rows at once. It reads the weight as it lies in memory, once; x, which is small, is
laid out in tiles before. A GEMM of torch rearranges the weight too. One core of a Xeon with AMX, milliseconds
of a product [3,072, 1,024] by tiles and by GEMM: 16 rows .56 and 1.00, 32 .67 and 1.11, 64 .82 and 1.41.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.decode_step.atomic import every, floats
from unfreeze.kernels.decode_step.operation import Operation
from unfreeze.kernels.decode_step.ops import LINEAR_ROWS
from unfreeze.kernels.decode_step.pointer import Callee
from unfreeze.kernels.decode_step.thin import NUMBERS, ONE, ZERO, add_of_slots, add_thin
from unfreeze.kernels.loops.amx_tile import SIDE, TILE, available, block, configure, restore, transpose
from unfreeze.kernels.loops.bf16_tile import LINE
from unfreeze.kernels.loops.numba_options import inner

FROM = 1
"""Rows from which products are computed by tiles: one row takes .52 ms, by the loop .66; four .53, 1.06."""
STEP = 32  # inner indices of a tile
PAIR = 2 * SIDE  # columns of x at once
BLOCKS = 4  # of LINEAR_ROWS rows, in a job: between two jobs nothing is read, for a fifth of a block's time
JOBS = 4  # of a matrix, for each thread at least: the last ones end together


def wide_from(pairs: bool) -> int | None:
    """Rows from which products are computed by tiles; None: never. pairs: the program multiplies in bf16."""
    return FROM if pairs and available() else None


def fits(weight: Tensor) -> bool:
    """True if tiles cover a weight of bf16 exactly."""
    height, width = weight.shape[-2:]
    return weight.dtype == torch.bfloat16 and height % LINEAR_ROWS == 0 and width % STEP == 0


def tiles_of(rows: int) -> int:
    """Tiles side by side for that many rows of x."""
    return -(-rows // SIDE)


def blocks_of(height: int) -> int:
    """Blocks of LINEAR_ROWS rows of the weight in a job."""
    return max(1, min(BLOCKS, height // (LINEAR_ROWS * JOBS * torch.get_num_threads())))


@Callee
def tile_rows(like, job, rows, arguments, numbers):
    """Rows 16 · job … of packed x as tiles: words [inner / 32, 16, 16], a column for each row."""
    a = every(arguments)
    packed, packed_stride, width, tiles = a[:4]
    if job * SIDE < rows:
        steps = width // STEP
        for i in range(steps):
            source = packed + job * SIDE * packed_stride + i * 2 * STEP
            transpose(source, packed_stride, tiles + (job * steps + i) * TILE, 4 * SIDE)


@inner
def _finish(a, f, s, first, sums):
    """y[s] = add[s] + f0 · (y[s] + bias + f1 · B t[s]) for as many of the outputs as `sums` has, in place."""
    height, count = a[8], sums.size
    y, y_stride, bias, add, add_stride, thin, thin_stride, rank, B, B_kind, B_tile = a[11:22]
    slots, of_slots = a[22:24]
    target = floats(y + s * y_stride + 4 * first, count)
    if thin:
        sums[:] = np.float32(0.0)
        if of_slots:
            add_of_slots(
                B_tile, slots, of_slots, ZERO, s, ONE, ZERO, ZERO, first, count, height, thin, thin_stride,
                sums,
            )  # fmt: skip
        else:
            add_thin(
                B_tile, B_kind, B, first, count, height, rank, thin + s * thin_stride, ZERO, ONE, f[1], sums
            )  # fmt: skip
        for k in range(count):
            target[k] += sums[k]
    if bias:
        more = floats(bias + 4 * first, count)
        for k in range(count):
            target[k] += more[k]
    if add:
        source = floats(add + s * add_stride + 4 * first, count)
        for k in range(count):
            target[k] = source[k] + f[0] * target[k]
    else:
        for k in range(count):
            target[k] *= f[0]


FOLLOWING = 27
"""Arguments from here on: address of the matrix that is read next, bytes of a job of it, threads."""


def follow(operations: Sequence[Operation]) -> None:
    """Tell each product by tiles which comes next; after the last, the first of the next step."""
    products = [each for each in operations if each.wide is not None]
    for each, next_ in zip(products, [*products[1:], *products[:1]], strict=True):
        codes, stride, blocks = (next_.arguments[i] for i in (1, 2, 26))
        each.arguments[FOLLOWING:] = [codes, blocks * LINEAR_ROWS * stride, torch.get_num_threads()]


@inner
def _then(a, job):
    """Address of what this thread reads after a job: the jobs of a matrix go to the threads in turn.

    For many rows that is guessed wrong too often: a step of 64 rows took 2 % longer, one of 16 rows 2 % less.
    """
    codes, stride, height, blocks = a[1], a[2], a[8], a[26]
    following, size, threads = a[27:30]  # FOLLOWING; numba wants numbers in a slice
    rows = blocks * LINEAR_ROWS
    first = (job + threads) * rows
    if first < height:
        return codes + first * stride
    return following + (first - height) // rows * size


@Callee
def linear_by_tiles(like, job, rows, arguments, numbers):
    """As ops.linear, for all rows at once: LINEAR_ROWS rows of W times two tiles of x at a time.

    y has room for whole tiles.
    """
    a, f = every(arguments), floats(numbers, NUMBERS)
    codes, stride, width, height, y, y_stride = a[1], a[2], a[7], a[8], a[11], a[12]
    tiles, config, blocks = a[24:27]
    begin, steps = job * blocks * LINEAR_ROWS, width // STEP
    end = min(begin + blocks * LINEAR_ROWS, height)
    before, products = np.empty(LINE, np.uint8), np.empty(PAIR * LINEAR_ROWS, np.float32)
    sums, at = np.empty(end - begin, np.float32), products.ctypes.data
    then = _then(a, job)
    configure(config, before.ctypes.data)
    for first in range(begin, end, LINEAR_ROWS):
        W = codes + first * stride
        ahead = then if first + LINEAR_ROWS >= end and rows <= PAIR else W + LINEAR_ROWS * stride
        for s in range(0, rows, PAIR):
            columns = 1 if rows - s <= SIDE else 2
            x = tiles + s // SIDE * steps * TILE
            block(W, stride, x, steps * TILE, steps, at, 4 * PAIR, ahead, columns)
            for j in range(columns):
                for i in range(2):
                    to = y + (s + j * SIDE) * y_stride + 4 * (first + i * SIDE)
                    transpose(at + 4 * (i * SIDE * PAIR + j * SIDE), 4 * PAIR, to, y_stride)
    restore(before.ctypes.data)
    before[0] = np.uint8(products[0] > 0)  # both live until here: their addresses are in use
    if a[13] or a[14] or a[16] or f[0] != 1:
        for s in range(rows):
            _finish(a, f, s, begin, sums)
