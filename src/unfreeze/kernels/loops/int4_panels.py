"""INT4 weights expanded directly into the panels of `bf16_tile`, 64 columns at a time.

A panel stays in a core's L2 cache.

A panel holds pairs of bf16. Two ways to fill it from W [N, M]:
- `pack_int4_rows`, for y = x Wᵀ: the product's columns are rows of W. A pair is one byte of codes (low nibble
  first), and sixteen rows have to be transposed.
- `pack_int4_columns`, for dx = dy W: the product's columns are columns of W. A pair is two rows, one above
  the other.
Values are the format's, bit for bit: bf16(float32(code - 8) · scale); but numbers under 1e-38 become 0, as
they do in the multiplication. A group (32 weights or more) has 16 possible values: a table in one register,
indexed by the nibble (more in row_dots.py).

N rows of W, M columns, B = M / 2 bytes of a row, `group_bytes` bytes of a group, a multiple of 16.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types

from unfreeze.kernels.loops.bf16_tile import (
    COLUMNS,
    FLOATS,
    HALVES,
    I16,
    I32,
    I64,
    LINE,
    PAIRS,
    everywhere,
    narrowed,
    pointer,
    prefetch,
)
from unfreeze.kernels.loops.llvm import Value, instruction
from unfreeze.kernels.loops.numba_options import serial

AHEAD = 32  # rows to prefetch ahead: 16 steps of `pack_int4_columns`, about the latency of memory
CHUNK_BYTES = 16  # bytes of codes at a time: 32 weights of one group

BYTES, SHORTS = ir.VectorType(ir.IntType(8), 16), ir.VectorType(I16, 16)


def _table(builder: ir.IRBuilder, scale: Value) -> Value:
    """The 16 values of a group, rounded to nearest even by one instruction.

    The register of 32 lanes has them twice (_weights says why). `scale`: address of the group's bf16 scale.
    """
    bits = builder.shl(
        builder.zext(builder.load(builder.inttoptr(scale, I16.as_pointer()), align=2), I32), I32(16)
    )
    one = builder.bitcast(bits, ir.FloatType())
    factor = everywhere(builder, one, FLOATS)
    exact = builder.fmul(ir.Constant(FLOATS, [float(code - 8) for code in range(16)]), factor)
    once = builder.bitcast(narrowed(builder, exact), SHORTS)
    return builder.shuffle_vector(once, once, ir.Constant(ir.VectorType(I32, 32), [*range(16), *range(16)]))


def _weights(builder: ir.IRBuilder, codes: Value, scale: Value) -> Value:
    """32 weights of one group in order, as bf16.

    codes: address of 16 bytes; scale: address of their bf16 scale.

    Each byte holds two codes and fills one 32-bit lane, which is looked up as two 16-bit lanes:

        bit   31..20   19..16 | 15..12   11..8   7..4   3..0
              0        high   | low      0       high   low        lane = byte | byte << 12

    The lookup (vpermw) takes the low five bits of each half. In the upper half bit 4 is 0. In the lower half
    it is the lowest bit of `high`, which must not matter: so the table of 16 values stands twice in the
    register.
    """
    bytes_ = builder.zext(builder.load(builder.inttoptr(codes, BYTES.as_pointer()), align=1), PAIRS)
    index = builder.bitcast(builder.or_(bytes_, builder.shl(bytes_, ir.Constant(PAIRS, [12] * 16))), HALVES)
    permute = builder.module.declare_intrinsic(
        "llvm.x86.avx512.permvar.hi.512", (), ir.FunctionType(HALVES, (HALVES, HALVES))
    )
    return builder.call(permute, (_table(builder, scale), index))


def _transposed(builder: ir.IRBuilder, rows: list[Value]) -> list[Value]:
    """16 vectors of 16 words, transposed.

    In four rounds, which exchange blocks of 1, 2, 4 and 8 words.
    """
    step = 1
    while step < 16:
        exchanged = list(rows)
        for i in range(16):
            if i & step:
                continue
            first = [lane if not lane & step else 16 + lane - step for lane in range(16)]
            second = [lane + step if not lane & step else 16 + lane for lane in range(16)]
            exchanged[i] = builder.shuffle_vector(rows[i], rows[i + step], ir.Constant(PAIRS, first))
            exchanged[i + step] = builder.shuffle_vector(rows[i], rows[i + step], ir.Constant(PAIRS, second))
        rows, step = exchanged, 2 * step
    return rows


@instruction
def _int4_rows(context, codes, code_stride, scales, scale_stride, out):  # pragma: no cover - compiled
    """out[k, j] = (W[j, 2k], W[j, 2k + 1]) for 16 rows j and 16 pairs k of one group.

    Addresses and strides in bytes; out rows of COLUMNS words.
    """

    def generate(_context, builder, _signature, arguments):
        codes, code_stride, scales, scale_stride, out = arguments
        # 16 rows of 32 weights: a register each, a pair of weights per lane
        rows = []
        for j in range(16):
            here, scale = (
                builder.add(base, builder.mul(stride, I64(j)))
                for base, stride in ((codes, code_stride), (scales, scale_stride))
            )
            rows.append(builder.bitcast(_weights(builder, here, scale), PAIRS))
        # rows of the panel are pairs, its columns are rows of W
        for k, row in enumerate(_transposed(builder, rows)):
            builder.store(row, pointer(builder, out, 4 * COLUMNS * k, PAIRS), align=4)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@instruction
def _int4_columns(context, codes, code_stride, scales, scale_stride, out):  # pragma: no cover - compiled
    """out[j] = (W[0, j], W[1, j]) for 32 columns j of one group. Addresses and strides in bytes."""

    def generate(_context, builder, _signature, arguments):
        codes, code_stride, scales, scale_stride, out = arguments
        # two rows of 32 weights, one above the other: a pair is a weight of each
        upper = _weights(builder, codes, scales)
        lower = _weights(builder, builder.add(codes, code_stride), builder.add(scales, scale_stride))
        # interleaved, 16 columns at a time: upper 0, lower 0, upper 1, lower 1, …
        for first in (0, 16):
            order = ir.Constant(ir.VectorType(I32, 32), [first + i // 2 + 32 * (i % 2) for i in range(32)])
            builder.store(
                builder.shuffle_vector(upper, lower, order), pointer(builder, out, 4 * first, HALVES), align=4
            )
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@serial
def pack_int4_rows(codes, scales, group_bytes, first, panel):
    """panel[k, j] = (W[first + j, 2k], W[first + j, 2k + 1]) for k < B.

    codes uint8 [N, B], scales uint16 [N, G], panel uint32 [>= B, COLUMNS].
    """
    for begin in range(0, codes.shape[1], CHUNK_BYTES):
        for j in range(0, COLUMNS, 16):
            here = codes.ctypes.data + (first + j) * codes.strides[0] + begin
            scale = scales.ctypes.data + (first + j) * scales.strides[0] + begin // group_bytes * 2
            if begin % LINE == 0:
                # those of the next panel: no hardware prefetcher foresees rows so far apart
                for i in range(16):
                    prefetch(here + (COLUMNS + i) * codes.strides[0])
                    prefetch(scale + (COLUMNS + i) * scales.strides[0])
            _int4_rows(
                here,
                codes.strides[0],
                scale,
                scales.strides[0],
                panel.ctypes.data + 4 * (begin * COLUMNS + j),
            )


@serial
def pack_int4_columns(codes, scales, group_bytes, first, panel):
    """panel[k, j] = (W[2k, first + j], W[2k + 1, first + j]) for k < N / 2.

    Shapes as in `pack_int4_rows`, panel [>= N / 2, COLUMNS].
    """
    for k in range(codes.shape[0] // 2):
        for begin in range(first // 2, (first + COLUMNS) // 2, CHUNK_BYTES):
            here = codes.ctypes.data + 2 * k * codes.strides[0] + begin
            scale = scales.ctypes.data + 2 * k * scales.strides[0] + begin // group_bytes * 2
            if begin % LINE == first // 2 % LINE:
                for i in range(2):
                    prefetch(here + (AHEAD + i) * codes.strides[0])
                    prefetch(scale + (AHEAD + i) * scales.strides[0])
            _int4_columns(
                here,
                codes.strides[0],
                scale,
                scales.strides[0],
                panel.ctypes.data + 4 * (k * COLUMNS + 2 * begin - first),
            )


@serial
def pack_bf16_columns(rows, first, panel, begin):
    """panel[begin + k, j] = (rows[2k, first + j], rows[2k + 1, first + j]).

    Appends bf16 rows [2 · pairs, .], a LoRA factor, to a panel as further pairs.
    """
    for k in range(rows.shape[0] // 2):
        upper, lower, words = (
            rows[2 * k, first : first + COLUMNS],
            rows[2 * k + 1, first : first + COLUMNS],
            panel[begin + k],
        )
        for j in range(COLUMNS):
            words[j] = np.uint32(np.uint32(upper[j]) | np.uint32(np.uint32(lower[j]) << np.uint32(16)))
