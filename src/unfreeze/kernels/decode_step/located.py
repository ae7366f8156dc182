"""Products with rows of packed weights that a formula finds: stacks, halves of them, scales of blocks.

Called like a function of tiles.py, but by number of row instead of address: `codes` is the number of the
first row in the whole stack, `stride` the step to the next. `table`: address of the description, int64:

    tile             address of the products of the kind (tiles.py)
    rows, parts      rows of one part of a matrix; its parts: 1, or 2 for gate and up apart (quant/halves.py)
    group            chunks of a scale as a power of two
    then PART numbers for each part:
    codes, next matrix, next row        an address, and bytes to the same of the next matrix and row
    scales, next matrix, next row, rows of the matrix that share one row of scales
    table, next matrix
"""

from __future__ import annotations

import numpy as np

from unfreeze.kernels.decode_step.atomic import floats, integers
from unfreeze.kernels.decode_step.pointer import Callee, call_products
from unfreeze.kernels.decode_step.rows import copy
from unfreeze.kernels.loops.numba_options import inner

HEAD, PART = 4, 9
FIELDS = HEAD + 2 * PART


@inner
def run_of(row, between, left, size):
    """The number of `left` rows, `between` apart, that lie in the same `size` rows as the first."""
    return min(left, (size - row % size + between - 1) // between)


@inner
def placed(sums, count, out, first, num_rows, n):
    """Sums [n, count] of rows from `first` on, into those of all rows."""
    all_ = floats(out, n * num_rows)
    for j in range(n):
        to = all_[j * num_rows + first : j * num_rows + first + count]
        copy(sums[j * count : (j + 1) * count], to)


@Callee
def located(like, num_rows, step, row, between, scales, scale_stride, table, group, width, xs, n, out):
    """Rows whose codes and scales are contiguous."""
    d = integers(table, FIELDS)
    tile, rows, parts, group = d[:HEAD]
    sums = np.empty(0, np.float32)
    i = 0
    while i < num_rows:
        matrix, r = (row + i * between) // rows, (row + i * between) % rows
        expert, begin = matrix // parts, HEAD + matrix % parts * PART
        codes, codes_next, stride, scales, scales_next, scale_stride, block, values, values_next = d[
            begin : begin + PART
        ]
        count = run_of(r, between, num_rows - i, rows)
        if block > 1:
            count = run_of(r, between, count, block)
        apart = n > 0 and count < num_rows
        to = out if n else out + 4 * i * width
        if apart:
            if sums.size == 0:
                sums = np.empty(4 * num_rows, np.float32)
            to = sums.ctypes.data
        codes += expert * codes_next + r * stride
        scales += expert * scales_next + r // block * scale_stride
        if block > 1:
            scale_stride = 0
        call_products(
            tile, like, count, step, codes, between * stride, scales, between * scale_stride,
            values + expert * values_next, group, width, xs, n, to,
        )  # fmt: skip
        if apart:
            placed(sums, count, out, i, num_rows, n)
        i += count
