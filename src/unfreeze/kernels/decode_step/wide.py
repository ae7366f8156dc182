"""Products of a step with many rows, by the CPU's matrix unit (loops/amx_tile.py).

The loop `linear` reads a matrix once and multiplies row by row: the time of a few rows is that of reading. A
matrix unit multiplies 16 rows at once. It reads the weight as it lies in memory, once; x, which is small, is
laid out in tiles before. A GEMM of torch rearranges the weight too. One core of a Xeon with AMX, milliseconds
of a product [3,072, 1,024] by tiles and by GEMM: 16 rows .56 and 1.00, 32 .67 and 1.11, 64 .82 and 1.41.
"""

from __future__ import annotations

import numpy as np

from unfreeze.kernels.decode_step.atomic import every, floats
from unfreeze.kernels.decode_step.ops import LINEAR_ROWS, NUMBERS, finish_products
from unfreeze.kernels.decode_step.pointer import Callee
from unfreeze.kernels.loops.amx_tile import SIDE, TILE, available, block, configure, restore, transpose

FROM = 5
"""Rows from which a product is computed by tiles: the loop reads a weight once for each four rows."""
STEP = 32  # inner indices of a tile
PAIR = 2 * SIDE  # columns of x at once


def wide_from(pairs: bool) -> int | None:
    """Rows from which products are computed by tiles; None: never. pairs: the program multiplies in bf16."""
    return FROM if pairs and available() else None


def fits(height: int, width: int) -> bool:
    """True if tiles cover a weight [height, width] exactly."""
    return height % LINEAR_ROWS == 0 and width % STEP == 0


def tiles_of(rows: int) -> int:
    """Tiles side by side for that many rows of x."""
    return -(-rows // SIDE)


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


@Callee
def linear_by_tiles(like, job, rows, arguments, numbers):
    """As ops.linear, for all rows at once: LINEAR_ROWS rows of W times two tiles of x at a time."""
    a, f = every(arguments), floats(numbers, NUMBERS)
    codes, stride, width, tiles, config = a[1], a[2], a[7], a[22], a[23]
    first, steps = job * LINEAR_ROWS, width // STEP
    before = np.empty(TILE, np.uint8)
    products, out = np.empty(PAIR * LINEAR_ROWS, np.float32), np.empty(PAIR * LINEAR_ROWS, np.float32)
    at, to = products.ctypes.data, out.ctypes.data
    configure(config, before.ctypes.data)
    for s in range(0, rows, PAIR):
        columns = 1 if rows - s <= SIDE else 2
        x = tiles + s // SIDE * steps * TILE
        block(codes + first * stride, stride, x, steps * TILE, steps, at, 4 * PAIR, columns)
        for j in range(columns):
            for i in range(2):
                source = at + 4 * (i * SIDE * PAIR + j * SIDE)
                transpose(source, 4 * PAIR, to + 4 * (j * SIDE * LINEAR_ROWS + i * SIDE), 4 * LINEAR_ROWS)
        for j in range(0, min(PAIR, rows - s), 4):
            n = min(4, rows - s - j)
            finish_products(a, f, s + j, n, first, LINEAR_ROWS, out[j * LINEAR_ROWS : (j + n) * LINEAR_ROWS])
    restore(before.ctypes.data)
    before[0] = np.uint8(products[0] + out[0])  # all live until here: their addresses are in use
