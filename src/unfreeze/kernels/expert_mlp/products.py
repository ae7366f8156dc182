"""Products of an expert's rows with a panel, in bf16 or float32: numba picks by the arrays' types.

In bf16 panels of pairs (loops/panels.py) and the tile of loops/bf16_tile.py; in float32 strips
(loops/strips.py) and the tile of loops/float_tile.py. a [r, >= inner], r a multiple of ROWS; Q a multiple of
8.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import overload

from unfreeze.kernels.expert_mlp import thin_cpu
from unfreeze.kernels.loops import bf16_tile, float_tile
from unfreeze.kernels.loops.bf16_tile import COLUMNS, LINE, narrow_tile, prefetch
from unfreeze.kernels.loops.float_tile import BLOCK, INNER, WIDTH
from unfreeze.kernels.loops.numba_options import inner as linked
from unfreeze.kernels.loops.strips import fill_strip

assert bf16_tile.ROWS == float_tile.ROWS
ROWS = bf16_tile.ROWS


def store(a: Any, inner: int, panel: Any, first: int, out: Any) -> None:
    """out[:, first : first + COLUMNS] = a · panel, rounded once; inside numba loops only."""
    raise NotImplementedError("called by compiled loops")


def add(a: Any, inner: int, panel: Any, sums: Any, first: int, token: Any, weight: Any, out: Any) -> None:
    """out[token[r], first : first + COLUMNS] += weight[r] · (a · panel)[r], in float32.

    Rows with token -1 (padding) are skipped. sums: scratch of the thread. Inside numba loops only.
    """
    raise NotImplementedError("called by compiled loops")


def dots(a: Any, b: Any, room: Any, sums: Any, out: Any) -> None:
    """out [r, Q] = a bᵀ, b [Q, .]; inside numba loops only."""
    raise NotImplementedError("called by compiled loops")


def outer(a: Any, b: Any, room: Any, out: Any) -> None:
    """out [Q, W] = aᵀ b in float32, a [r, Q] and b [r, W]; inside numba loops only."""
    raise NotImplementedError("called by compiled loops")


@overload(store)
def _store_of(a, inner, panel, first, out):
    if panel.dtype == types.float32:
        return lambda a, inner, panel, first, out: _store_strips(a, inner, panel, first, out)
    return lambda a, inner, panel, first, out: _store_pairs(a, inner // 2, panel, first, out)


@overload(add)
def _add_of(a, inner, panel, sums, first, token, weight, out):
    if panel.dtype == types.float32:
        return lambda a, inner, panel, sums, first, token, weight, out: _add_strips(
            a, inner, panel, sums, first, token, weight, out
        )
    return lambda a, inner, panel, sums, first, token, weight, out: _add_pairs(
        a, inner // 2, panel, sums, first, token, weight, out
    )


@overload(dots)
def _dots_of(a, b, room, sums, out):
    if a.dtype == types.float32:
        return lambda a, b, room, sums, out: _dots_strips(a, b, room, sums, out)
    return lambda a, b, room, sums, out: thin_cpu.dots_loop(a, b, room, out)


@overload(outer)
def _outer_of(a, b, room, out):
    if a.dtype == types.float32:
        return lambda a, b, room, out: _outer_tiles(a, b, room, out)
    return lambda a, b, room, out: thin_cpu.outer_loop(a, b, room[: a.shape[0] // 2], out)


@linked
def _store_pairs(a, pairs, panel, first, out):
    for row in range(0, a.shape[0], ROWS):
        here, there = a.ctypes.data + row * a.strides[0], out.ctypes.data + row * out.strides[0] + 2 * first
        narrow_tile(here, a.strides[0], panel.ctypes.data, pairs, there, out.strides[0])


@linked
def _add_pairs(a, pairs, panel, sums, first, token, weight, out):
    for row in range(0, a.shape[0], ROWS):
        _ask(token, row, row + ROWS, first, out)
        here = a.ctypes.data + row * a.strides[0]
        bf16_tile.tile(here, a.strides[0], panel.ctypes.data, pairs, sums.ctypes.data, sums.strides[0])
        _scatter(sums, token, weight, row, row + ROWS, first, out)


@linked
def _ask(token, begin, end, first, out):
    """Prefetch the tokens' rows of `out` while the tile is computed: they lie far apart in memory."""
    for row in range(begin, end):
        where = out.ctypes.data + max(token[row], 0) * out.strides[0] + 4 * first
        for line in range(0, 4 * COLUMNS, LINE):
            prefetch(where + line)


@linked
def _scatter(sums, token, weight, begin, end, first, out):
    """out[token[r], first : first + COLUMNS] += weight[r] · sums[r - begin] for r in begin .. end."""
    for row in range(begin, end):
        if token[row] >= 0:
            target, product, w = out[token[row], first : first + COLUMNS], sums[row - begin], weight[row]
            for j in range(COLUMNS):
                target[j] += w * product[j]


@linked
def _strips(a, begin, end, inner, panel, out, out_stride):
    """a[begin:end, :inner] · panel at address `out`; INNER of a and of a strip stay in L1 and L2."""
    for k in range(0, inner, INNER):
        count, fresh = min(INNER, inner - k), 1 if k == 0 else 0
        for s in range(panel.shape[0]):
            strip = panel.ctypes.data + s * panel.strides[0] + k * panel.strides[1]
            there = out + 4 * s * WIDTH
            for row in range(begin, end, ROWS):
                float_tile.tile(
                    a.ctypes.data + row * a.strides[0] + 4 * k,
                    a.strides[0],
                    strip,
                    panel.strides[1],
                    count,
                    fresh,
                    there + (row - begin) * out_stride,
                    out_stride,
                )


@linked
def _store_strips(a, inner, panel, first, out):
    for begin in range(0, a.shape[0], BLOCK):
        there = out.ctypes.data + begin * out.strides[0] + 4 * first
        _strips(a, begin, min(begin + BLOCK, a.shape[0]), inner, panel, there, out.strides[0])


@linked
def _add_strips(a, inner, panel, sums, first, token, weight, out):
    for begin in range(0, a.shape[0], BLOCK):
        end = min(begin + BLOCK, a.shape[0])
        _strips(a, begin, end, inner, panel, sums.ctypes.data, sums.strides[0])
        _ask(token, begin, end, first, out)
        _scatter(sums, token, weight, begin, end, first, out)


@linked
def _dots_strips(a, b, room, sums, out):
    """room [1, >= inner, WIDTH], sums [BLOCK, >= WIDTH]."""
    for first in range(0, b.shape[0], WIDTH):
        fill_strip(b, first, room)
        columns = min(WIDTH, b.shape[0] - first)
        for begin in range(0, a.shape[0], BLOCK):
            end = min(begin + BLOCK, a.shape[0])
            _strips(a, begin, end, b.shape[1], room, sums.ctypes.data, sums.strides[0])
            for row in range(begin, end):
                for j in range(columns):
                    out[row, first + j] = sums[row - begin, j]


@linked
def _outer_tiles(a, b, room, out):
    """room [Q, >= r]: a's columns as rows. b's columns are strips already."""
    rows, columns = a.shape
    for row in range(rows):
        for q in range(columns):
            room[q, row] = a[row, q]
    for first in range(0, b.shape[1], WIDTH):
        for begin in range(0, columns, ROWS):
            # the last tile repeats some columns
            q = min(begin, columns - ROWS)
            float_tile.tile(
                room.ctypes.data + q * room.strides[0],
                room.strides[0],
                b.ctypes.data + 4 * first,
                b.strides[0],
                rows,
                1,
                out.ctypes.data + q * out.strides[0] + 4 * first,
                out.strides[0],
            )
