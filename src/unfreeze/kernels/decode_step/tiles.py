"""Products of some weight rows with 1 to 4 packed rows of x, one function per kind of weight (dots.py).

out[j, i] = w_i · x_j            i < num_rows, j < n

step                   weight rows of a tile, 1 or 4. Memory delivers one row after another best; from the
                       cache four at a time load x once
codes, stride          address of the first row, bytes to the next       scales, scale_stride   the same
table, group           INT4: address of the values (lookup.py), chunks of a scale as a power of two
width                  numbers of a row; INT4 has whole chunks only, dense rows any number
xs, n                  address of n addresses of x; n = 3 reads a fourth, any valid one
out                    address of float32 [4, num_rows]
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
def float32(like, num_rows, step, codes, stride, scales, scale_stride, table, group, width, xs, n, out):
    """Rows of float32."""
    chunks, bytes_ = width // CHUNK, 4 * num_rows
    i = 0
    while i < num_rows:
        count = step if i + step <= num_rows else 1
        row, scale, to = codes + i * stride, scales + i * scale_stride, out + 4 * i
        if count == 4 and n == 1:
            _float32_4_1(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif count == 4 and n == 2:
            _float32_4_2(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif count == 4:
            _float32_4_4(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif n == 1:
            _float32_1_1(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif n == 2:
            _float32_1_2(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        else:
            _float32_1_4(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        i += count
    if chunks * CHUNK < width:
        _rest(like, num_rows, 4, codes, stride, chunks * CHUNK, width, xs, n, out)


@Callee
def bf16(like, num_rows, step, codes, stride, scales, scale_stride, table, group, width, xs, n, out):
    """Rows of bf16."""
    chunks, bytes_ = width // CHUNK, 4 * num_rows
    i = 0
    while i < num_rows:
        count = step if i + step <= num_rows else 1
        row, scale, to = codes + i * stride, scales + i * scale_stride, out + 4 * i
        if count == 4 and n == 1:
            _bf16_4_1(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif count == 4 and n == 2:
            _bf16_4_2(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif count == 4:
            _bf16_4_4(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif n == 1:
            _bf16_1_1(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif n == 2:
            _bf16_1_2(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        else:
            _bf16_1_4(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        i += count
    if chunks * CHUNK < width:
        _rest(like, num_rows, 2, codes, stride, chunks * CHUNK, width, xs, n, out)


@Callee
def int4(like, num_rows, step, codes, stride, scales, scale_stride, table, group, width, xs, n, out):
    """Rows of INT4 codes."""
    chunks, bytes_ = width // CHUNK, 4 * num_rows
    i = 0
    while i < num_rows:
        count = step if i + step <= num_rows else 1
        row, scale, to = codes + i * stride, scales + i * scale_stride, out + 4 * i
        if count == 4 and n == 1:
            _int4_4_1(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif count == 4 and n == 2:
            _int4_4_2(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif count == 4:
            _int4_4_4(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif n == 1:
            _int4_1_1(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        elif n == 2:
            _int4_1_2(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        else:
            _int4_1_4(like, row, stride, scale, scale_stride, table, group, chunks, xs, to, bytes_)
        i += count
