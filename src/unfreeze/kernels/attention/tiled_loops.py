"""The loops of tiled_cpu.py: a block of queries against a block of keys, in the tiles of loops/float_tile.py.

One query head of one document at a time, float32. Scores of QUERIES by KEYS stay in L2 from the product to
the next one; nothing of length L x L exists.

    forward     S = scale · q kᵀ,  P = exp(S - m),  o = Σ P v / Σ P       m: running maximum of a row
    backward    P = exp(S - lse),  dS = scale · P (do vᵀ - do·o)
                dq = dS k,  dk = dSᵀ q,  dv = Pᵀ do

Source: FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.

A product a · b reads a in rows and b in *strips*: for each inner index WIDTH neighbouring columns. Widths d
and v are padded with zeros to whole strips, D and V. Rows are taken ROWS at a time, and transposed SIDE by
SIDE. L tokens, H query heads, G key/value heads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types

from unfreeze.kernels.loops.bf16_tile import FLOATS, I64, pointer
from unfreeze.kernels.loops.float_tile import ROWS, WIDTH, tile
from unfreeze.kernels.loops.lanes import exponentials, largest
from unfreeze.kernels.loops.llvm import instruction
from unfreeze.kernels.loops.numba_options import exp, inner, serial
from unfreeze.kernels.loops.strips import transposed

SIDE = 16
QUERIES = 96  # a multiple of ROWS and of SIDE
KEYS = 384  # a multiple of QUERIES and of WIDTH: scores of a block take 150 KB
NEAR = 48  # rows that pass a strip while both are in L1
assert QUERIES % ROWS == QUERIES % SIDE == KEYS % QUERIES == KEYS % WIDTH == 0
ZERO = np.float32(0.0)


class Forward(NamedTuple):
    """Buffers of one thread. L is rounded up to whole strips."""

    q: np.ndarray  # [QUERIES, D]
    k_T: np.ndarray  # [L / WIDTH, D, WIDTH]: keys are columns
    v: np.ndarray  # [V / WIDTH, L, WIDTH]
    scores: np.ndarray  # [QUERIES, KEYS + SIDE]: no power of two between rows
    o: np.ndarray  # [QUERIES, V]
    largest: np.ndarray  # [QUERIES], of scale · S
    sums: np.ndarray  # [QUERIES], of P


class Backward(NamedTuple):
    """Buffers of one thread, as above. dk and dv have ROWS rows more than L."""

    q: np.ndarray  # [QUERIES, D]
    do: np.ndarray  # [QUERIES, V]
    k_T: np.ndarray  # [L / WIDTH, D, WIDTH]
    v_T: np.ndarray  # [L / WIDTH, V, WIDTH]
    k: np.ndarray  # [D / WIDTH, L, WIDTH]
    scores: np.ndarray  # [QUERIES, KEYS + SIDE], then P
    dscores: np.ndarray  # the same, dP, then dS
    scores_T: np.ndarray  # [KEYS + ROWS, QUERIES]
    dscores_T: np.ndarray
    dq: np.ndarray  # [QUERIES, D]
    dk: np.ndarray  # [L + ROWS, D]
    dv: np.ndarray  # [L + ROWS, V]


@instruction
def _transpose(context, source, stride, target, target_stride):  # pragma: no cover - compiled
    """target[j, i] = source[i, j], SIDE by SIDE; addresses and strides in bytes."""

    def generate(_context, builder, _signature, arguments):
        source, stride, target, target_stride = arguments

        def places(address, step):
            return [pointer(builder, address, builder.mul(step, I64(i)), FLOATS) for i in range(SIDE)]

        rows = [builder.load(place, align=4) for place in places(source, stride)]
        columns = transposed(
            builder, [builder.bitcast(row, ir.VectorType(ir.IntType(32), 16)) for row in rows]
        )
        for column, place in zip(columns, places(target, target_stride), strict=True):
            builder.store(builder.bitcast(column, FLOATS), place, align=4)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@inner
def _take(x, begin, end, width, out):
    """out[r, :] = x[begin + r], zero beyond `end` and beyond `width`."""
    for r in range(out.shape[0]):
        target = out[r]
        target[:] = ZERO
        if begin + r < end:
            row = x[begin + r]
            for i in range(width):
                target[i] = row[i]


@inner
def _strips(x, out):
    """out[s, n, j] = x[n, WIDTH s + j], zero beyond x."""
    length, width = x.shape
    for s in range(out.shape[0]):
        columns = min(WIDTH, width - s * WIDTH)
        for n in range(out.shape[1]):
            target = out[s, n]
            target[:] = ZERO
            if n < length:
                for j in range(columns):
                    target[j] = x[n, s * WIDTH + j]


@inner
def _strips_transposed(x, out):
    """out[s, i, j] = x[WIDTH s + j, i], zero beyond x."""
    length, width = x.shape
    for n in range(0, out.shape[0] * WIDTH, SIDE):
        strip, place = out[n // WIDTH], n % WIDTH
        for i in range(0, out.shape[1], SIDE):
            if n + SIDE <= length and i + SIDE <= width:
                here = x.ctypes.data + n * x.strides[0] + i * x.strides[1]
                there = strip.ctypes.data + i * strip.strides[0] + place * 4
                _transpose(here, x.strides[0], there, strip.strides[0])
            else:
                for j in range(SIDE):
                    for k in range(i, min(i + SIDE, out.shape[1])):
                        inside = n + j < length and k < width
                        strip[k, place + j] = x[n + j, k] if inside else ZERO


@inner
def _multiply(a, rows, first, strips, begin, end, out):
    """out[r, n - begin] = a[r] · b[n] for keys begin <= n < end that query first + r sees, and some more.

    strips: b transposed.
    """
    for near in range(0, rows, NEAR):
        for n in range(begin, min(end, first + near + NEAR), WIDTH):
            strip = strips[n // WIDTH]
            for r in range(max(near, (n - first) // ROWS * ROWS), min(rows, near + NEAR), ROWS):
                here, there = a.ctypes.data + r * a.strides[0], out.ctypes.data + r * out.strides[0]
                column = there + 4 * (n - begin)
                tile(
                    here,
                    a.strides[0],
                    strip.ctypes.data,
                    strip.strides[0],
                    strip.shape[0],
                    1,
                    column,
                    out.strides[0],
                )


@inner
def _seen(r, first, begin, end):
    """Return the keys of this block that query first + r sees, and those that the last of its ROWS sees."""
    return min(first + r + 1, end) - begin, min(first + r // ROWS * ROWS + ROWS, end) - begin


@inner
def _add(p, rows, first, begin, end, strips, fresh, out):
    """out[r] (+)= Σ_n p[r, n - begin] b[n] over the keys that the queries see; strips: b."""
    for s in range(strips.shape[0]):
        strip = strips[s, begin:end]
        for r in range(0, rows, ROWS):
            _, keys = _seen(r, first, begin, end)
            here, there = p.ctypes.data + r * p.strides[0], out.ctypes.data + r * out.strides[0]
            column = there + 4 * s * WIDTH
            tile(here, p.strides[0], strip.ctypes.data, strip.strides[0], keys, fresh, column, out.strides[0])


@inner
def _softmax(room, rows, first, begin, end, scale):
    """Scores become P; the sums so far are scaled to the new maximum of their row."""
    for r in range(rows):
        keys, filled = _seen(r, first, begin, end)
        row = room.scores[r, :keys]
        shift = np.float32(scale * largest(row))
        if begin:
            before = room.largest[r]
            shift = max(shift, before)
            share = exp(np.float32(before - shift))
            room.sums[r] *= share
            for i in range(room.o.shape[1]):
                room.o[r, i] *= share
        else:
            room.sums[r] = ZERO
        room.largest[r] = shift
        room.sums[r] += exponentials(row, scale, shift)
        room.scores[r, keys:filled] = ZERO


@inner
def _heads(job, start, H, G):
    """Return (document, query head, its key head, True if that key head's strips are not there yet)."""
    s, h = job // H, job % H
    return s, h, h // (H // G), job == start or h % (H // G) == 0


@serial
def forward(start, stop, q, k, v, scale, o, lse, room):
    """Jobs start .. stop - 1 of S · H: job s · H + h is query head h of document s.

    q [S, L, H, d], k [S, L, G, d], v [S, L, G, v], o [S, L, H, v]; lse [S, H, L], the log-sum-exp of a row.
    """
    L, H, d, width = q.shape[1], q.shape[2], q.shape[3], v.shape[3]
    for job in range(start, stop):
        s, h, g, new = _heads(job, start, H, k.shape[2])
        if new:
            _strips_transposed(k[s, :, g], room.k_T)
            _strips(v[s, :, g], room.v)
        for first in range(0, L, QUERIES):
            rows = min(QUERIES, L - first)
            _take(q[s, :, h], first, first + rows, d, room.q)
            for begin in range(0, first + rows, KEYS):
                end = min(begin + KEYS, first + rows)
                _multiply(room.q, rows, first, room.k_T, begin, end, room.scores)
                _softmax(room, rows, first, begin, end, scale)
                _add(room.scores, rows, first, begin, end, room.v, int(begin == 0), room.o)
            for r in range(rows):
                share = np.float32(np.float32(1.0) / room.sums[r])
                target = o[s, first + r, h]
                for i in range(width):
                    target[i] = np.float32(room.o[r, i] * share)
                lse[s, h, first + r] = np.float32(room.largest[r] + np.float32(np.log(room.sums[r])))


@inner
def _softmax_backward(room, rows, first, begin, end, scale, lse, o):
    """Scores become P, dP becomes dS; zero for keys that a query does not see, and beyond the last row."""
    filled = -(-(end - begin) // SIDE) * SIDE
    for r in range(-(-rows // SIDE) * SIDE):
        row, d, keys = room.scores[r], room.dscores[r], 0
        if r < rows:
            keys, _ = _seen(r, first, begin, end)
            # Σ do · o is what softmax's backward subtracts, Σ_n P dP, without a pass over P
            shift, off, out, grad = lse[first + r], ZERO, o[first + r], room.do[r]
            for i in range(out.size):
                off += np.float32(grad[i] * out[i])
            for n in range(keys):
                e = exp(np.float32(np.float32(scale * row[n]) - shift))
                row[n] = e
                d[n] = np.float32(np.float32(scale * e) * np.float32(d[n] - off))
        row[keys:filled] = ZERO
        d[keys:filled] = ZERO


@inner
def _turn(p, rows, first, begin, end, out):
    """out[n - begin, r] = p[r, n - begin] for the keys of a block, but those that no query of SIDE sees."""
    for r in range(0, rows, SIDE):
        for n in range(begin, min(end, first + r + SIDE + ROWS), SIDE):
            here = p.ctypes.data + r * p.strides[0] + 4 * (n - begin)
            there = out.ctypes.data + (n - begin) * out.strides[0] + 4 * r
            _transpose(here, p.strides[0], there, out.strides[0])


@inner
def _add_turned(p_T, rows, first, begin, end, b, out):
    """out[n] += Σ_r p_T[n - begin, r] b[r] over the queries that see key n; b's columns are strips."""
    rows = -(-rows // SIDE) * SIDE
    for column in range(0, out.shape[1], WIDTH):
        for n in range(begin, end, ROWS):
            r = max(0, n - first) // SIDE * SIDE
            here = p_T.ctypes.data + (n - begin) * p_T.strides[0] + 4 * r
            strip = b.ctypes.data + r * b.strides[0] + 4 * column
            there = out.ctypes.data + n * out.strides[0] + 4 * column
            tile(here, p_T.strides[0], strip, b.strides[0], rows - r, 0, there, out.strides[0])


@serial
def backward(start, stop, do, q, k, v, o, lse, scale, dq, dk, dv, room):
    """Jobs as in `forward`. do and dq as o and q; dk [S, L, H, d] and dv [S, L, H, v] of each query head."""
    L, H, d, width = q.shape[1], q.shape[2], q.shape[3], v.shape[3]
    for job in range(start, stop):
        s, h, g, new = _heads(job, start, H, k.shape[2])
        if new:
            _strips_transposed(k[s, :, g], room.k_T)
            _strips_transposed(v[s, :, g], room.v_T)
            _strips(k[s, :, g], room.k)
        room.dk[:] = ZERO
        room.dv[:] = ZERO
        for first in range(0, L, QUERIES):
            rows = min(QUERIES, L - first)
            _take(q[s, :, h], first, first + rows, d, room.q)
            _take(do[s, :, h], first, first + rows, width, room.do)
            for begin in range(0, first + rows, KEYS):
                end = min(begin + KEYS, first + rows)
                _multiply(room.q, rows, first, room.k_T, begin, end, room.scores)
                _multiply(room.do, rows, first, room.v_T, begin, end, room.dscores)
                _softmax_backward(room, rows, first, begin, end, scale, lse[s, h], o[s, :, h])
                _add(room.dscores, rows, first, begin, end, room.k, int(begin == 0), room.dq)
                _turn(room.scores, rows, first, begin, end, room.scores_T)
                _turn(room.dscores, rows, first, begin, end, room.dscores_T)
                _add_turned(room.scores_T, rows, first, begin, end, room.do, room.dv)
                _add_turned(room.dscores_T, rows, first, begin, end, room.q, room.dk)
            for r in range(rows):
                for i in range(d):
                    dq[s, first + r, h, i] = room.dq[r, i]
        for n in range(L):
            for i in range(d):
                dk[s, n, h, i] = room.dk[n, i]
            for i in range(width):
                dv[s, n, h, i] = room.dv[n, i]
