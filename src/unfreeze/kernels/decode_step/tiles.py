"""Products of some weight rows with 1 to 4 packed rows of x, one function per kind of weight (codes.py).

out[j, i] = w_i · x_j            i < num_rows, j < n
out[i, k] = w_i[k]               n = 0: the weights themselves, as the products take them

step                   weight rows at a time, 1 or 4. Memory delivers one row after another best; from the
                       cache four at a time load x once
codes, stride          address of the first row, bytes to the next       scales, scale_stride   the same
table, group           what the kind needs; chunks of a scale as a power of two
width                  numbers of a row, any
xs, n                  address of n addresses of x; n = 3 reads a fourth, any valid one
out                    address of float32 [4, num_rows], or [num_rows, width]
"""

from __future__ import annotations

import functools

import numpy as np
from numba.core import types
from numba.extending import overload

from unfreeze.kernels.decode_step.atomic import floats, integers, octets, words
from unfreeze.kernels.decode_step.codes import CHUNK, row_class
from unfreeze.kernels.decode_step.dots import products, weights
from unfreeze.kernels.decode_step.pointer import Callee
from unfreeze.kernels.decode_step.rows import copy
from unfreeze.kernels.loops.numba_options import inner, widen


def unpacked(like, address, i):  # pragma: no cover - body below
    """Element i of a packed row, beyond its last whole chunk."""
    raise NotImplementedError("only inside numba loops")


@overload(unpacked, inline="always")
def _unpacked(like, address, i):
    if like == types.uint16:
        return lambda like, address, i: widen(words(address, i + 1)[i])
    return lambda like, address, i: floats(address, i + 1)[i]


@inner
def _copy(source, count, target, size):
    """`count` bytes, and zeros up to `size`."""
    of, to = octets(source, count), octets(target, size)
    for i in range(size):
        to[i] = of[i] if i < count else np.uint8(0)


@inner
def _add_rest(like, part, i, num_rows, first, width, xs, n, out):
    """Add the products of the weights beyond the last whole chunk, `part`, to the sums of row i."""
    addresses, totals = integers(xs, n), floats(out, num_rows * n)
    for j in range(n):
        total = totals[j * num_rows + i]
        for k in range(first, width):
            total += part[k - first] * unpacked(like, addresses[j], k)
        totals[j * num_rows + i] = total


@functools.cache
def tile(kind: str) -> Callee:
    """The products of a kind of weight, by its name in codes.py."""
    size = row_class(kind).size
    two_scales = kind.startswith("nvfp4")

    def rows(like, num_rows, step, codes, stride, scales, scale_stride, table, group, width, xs, n, out):
        whole, rest = width // CHUNK, width % CHUNK
        i = 0
        while i < num_rows and n:
            count = step if i + step <= num_rows else 1
            products(
                kind, like, count, n, codes + i * stride, stride, scales + i * scale_stride, scale_stride,
                table, group, whole, xs, out + 4 * i, 4 * num_rows,
            )  # fmt: skip
            i += count
        if n and not rest:
            return
        # the weights themselves, chunk by chunk; of the last one nothing is read beyond the row
        part, last = np.empty(CHUNK, np.float32), np.empty(5 * CHUNK, np.uint8)
        for i in range(num_rows):
            row, scale = codes + i * stride, scales + i * scale_stride
            for chunk in range(whole if n == 0 else 0):
                to = out + 4 * (i * width + chunk * CHUNK)
                weights(kind, like, row, scale, table, group, chunk, to)
            if rest:
                # taken here: such an array lives as long as the loop that takes its address
                ends = last.ctypes.data
                _copy(row + whole * size, (rest * size + CHUNK - 1) // CHUNK, ends, size)
                if two_scales:
                    _copy(scale + whole * 2, (rest + 15) // 16, ends + 4 * CHUNK, 2)
                    scale = ends + 4 * CHUNK - whole * 2
                weights(kind, like, ends - whole * size, scale, table, group, whole, part.ctypes.data)
                if n:
                    _add_rest(like, part, i, num_rows, whole * CHUNK, width, xs, n, out)
                else:
                    copy(part[:rest], floats(out + 4 * (i * width + whole * CHUNK), rest))

    return Callee(rows)


float32, bf16, int4 = map(tile, ("float32", "bf16", "int4"))
