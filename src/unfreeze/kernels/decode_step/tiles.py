"""Products of 1 or 4 weight rows with 1 to 4 packed rows of x, one function per kind of weight (dots.py).

out[j, i] = w_i · x_j

codes, stride          address of the first row, bytes to the next       scales, scale_stride   the same
table, group           INT4: address of the values (lookup.py), chunks of a scale as a power of two
width                  numbers of a row; INT4 has whole chunks only, dense rows any number
xs, n                  address of n addresses of x; n = 3 reads a fourth, any valid one, and fills out for four
out                    address of float32 [n, num_rows]
"""

from __future__ import annotations

from numba.core import types
from numba.extending import overload

from unfreeze.kernels.decode_step.atomic import floats, integers, words
from unfreeze.kernels.decode_step.dots import BF16_TILES, CHUNK, FLOAT32_TILES, INT4_TILES
from unfreeze.kernels.decode_step.pointer import Callee
from unfreeze.kernels.loops.numba_options import inner, widen

_float32_1_1, _float32_1_2, _float32_1_4, _float32_4_1, _float32_4_2, _float32_4_4 = FLOAT32_TILES
_bf16_1_1, _bf16_1_2, _bf16_1_4, _bf16_4_1, _bf16_4_2, _bf16_4_4 = BF16_TILES
_int4_1_1, _int4_1_2, _int4_1_4, _int4_4_1, _int4_4_2, _int4_4_4 = INT4_TILES


def unpacked(like, address, i):  # pragma: no cover - body below
    """Element i of a packed row, beyond its last whole chunk."""
    raise NotImplementedError("only inside numba loops")


@overload(unpacked, inline="always")
def _unpacked(like, address, i):
    if like == types.uint16:
        return lambda like, address, i: widen(words(address, i + 1)[i])
    return lambda like, address, i: floats(address, i + 1)[i]


@inner
def _rest(like, num_rows, size, codes, stride, first, width, xs, n, out):
    """Add the products of the elements beyond the last whole chunk; `size`: bytes of a dense weight."""
    addresses, totals = integers(xs, n), floats(out, num_rows * n)
    for i in range(num_rows):
        row = codes + i * stride
        for j in range(n):
            total = totals[j * num_rows + i]
            for k in range(first, width):
                x = unpacked(like, addresses[j], k)
                total += x * (floats(row, width)[k] if size == 4 else widen(words(row, width)[k]))
            totals[j * num_rows + i] = total


@Callee
def float32(like, num_rows, codes, stride, scales, scale_stride, table, group, width, xs, n, out):
    """Rows of float32."""
    chunks = width // CHUNK
    if num_rows == 4 and n == 1:
        _float32_4_1(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif num_rows == 4 and n == 2:
        _float32_4_2(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif num_rows == 4:
        _float32_4_4(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif n == 1:
        _float32_1_1(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif n == 2:
        _float32_1_2(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    else:
        _float32_1_4(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    if chunks * CHUNK < width:
        _rest(like, num_rows, 4, codes, stride, chunks * CHUNK, width, xs, n, out)


@Callee
def bf16(like, num_rows, codes, stride, scales, scale_stride, table, group, width, xs, n, out):
    """Rows of bf16."""
    chunks = width // CHUNK
    if num_rows == 4 and n == 1:
        _bf16_4_1(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif num_rows == 4 and n == 2:
        _bf16_4_2(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif num_rows == 4:
        _bf16_4_4(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif n == 1:
        _bf16_1_1(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif n == 2:
        _bf16_1_2(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    else:
        _bf16_1_4(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    if chunks * CHUNK < width:
        _rest(like, num_rows, 2, codes, stride, chunks * CHUNK, width, xs, n, out)


@Callee
def int4(like, num_rows, codes, stride, scales, scale_stride, table, group, width, xs, n, out):
    """Rows of INT4 codes."""
    chunks = width // CHUNK
    if num_rows == 4 and n == 1:
        _int4_4_1(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif num_rows == 4 and n == 2:
        _int4_4_2(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif num_rows == 4:
        _int4_4_4(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif n == 1:
        _int4_1_1(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    elif n == 2:
        _int4_1_2(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
    else:
        _int4_1_4(like, codes, stride, scales, scale_stride, table, group, chunks, xs, out)
