"""INT4 weights expanded straight into the panels of `bf16_tile`: 64 columns at a time, which stay in a core's L2 and are never in memory.

For y = x Wᵀ the columns of the product are rows of W [N, M], so pairs along M come from one byte of codes (low nibble first) and sixteen rows
have to be transposed (`across`). For dx = dy W the columns are columns of W, and pairs are two rows one above the other (`along`). Values are those
of the format, bit for bit: bf16(float32(code - 8) · scale). A group of 32 weights or more has 16 of them, a table in one register that a nibble
looks up (row_dots.py has more on this).

N rows of W, M columns, B = M / 2 bytes of a row, `half` bytes of a group, a multiple of 16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from unfreeze.kernels.bf16_tile import COLUMNS, FLOATS, I16, I32, I64, PAIRS, everywhere, pointer
from unfreeze.kernels.numba_options import serial

BYTES = ir.VectorType(ir.IntType(8), 16)
CHUNK = 16  # bytes of codes at a time: 32 weights of one group


def _lanes(value: int) -> ir.Constant:
    return ir.Constant(PAIRS, [value] * 16)


def _table(builder: ir.IRBuilder, scale: ir.Value) -> ir.Value:
    """The 16 values of a group as float32 whose low half is zero. `scale`: address of its bf16."""
    bits = builder.shl(builder.zext(builder.load(builder.inttoptr(scale, I16.as_pointer()), align=2), I32), I32(16))
    exact = builder.fmul(ir.Constant(FLOATS, [float(code - 8) for code in range(16)]), everywhere(builder, builder.bitcast(bits, ir.FloatType()), FLOATS))
    exact = builder.bitcast(exact, PAIRS)
    odd = builder.and_(builder.lshr(exact, _lanes(16)), _lanes(1))
    return builder.bitcast(builder.and_(builder.add(exact, builder.add(odd, _lanes(0x7FFF))), _lanes(0xFFFF0000)), FLOATS)


def _looked_up(builder: ir.IRBuilder, table: ir.Value, codes: ir.Value) -> ir.Value:
    """table[low 4 bits of each lane], as integers."""
    permute = builder.module.declare_intrinsic("llvm.x86.avx512.permvar.sf.512", (), ir.FunctionType(FLOATS, (FLOATS, PAIRS)))
    return builder.bitcast(builder.call(permute, (table, codes)), PAIRS)


def _codes(builder: ir.IRBuilder, address: ir.Value) -> tuple[ir.Value, ir.Value]:
    """16 bytes as lanes: (as they are, shifted to their high nibbles)."""
    lanes = builder.zext(builder.load(builder.inttoptr(address, BYTES.as_pointer()), align=1), PAIRS)
    return lanes, builder.lshr(lanes, _lanes(4))


def _pair(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Words of two bf16 from float32 bits whose low half is zero."""
    return builder.or_(builder.lshr(low, _lanes(16)), high)


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """16 vectors of 16 words, rows and columns exchanged: four rounds of exchanging blocks of 1, 2, 4 and 8."""
    step = 1
    while step < 16:
        turned = list(rows)
        for i in range(16):
            if i & step:
                continue
            first = [lane if not lane & step else 16 + lane - step for lane in range(16)]
            second = [lane + step if not lane & step else 16 + lane for lane in range(16)]
            turned[i] = builder.shuffle_vector(rows[i], rows[i + step], ir.Constant(PAIRS, first))
            turned[i + step] = builder.shuffle_vector(rows[i], rows[i + step], ir.Constant(PAIRS, second))
        rows, step = turned, 2 * step
    return rows


@intrinsic
def _across(context, codes, code_stride, scales, scale_stride, out):  # pragma: no cover - compiled
    """out[k, j] = (W[j, 2k], W[j, 2k + 1]) for 16 rows j and 16 pairs k of one group. Addresses and strides in bytes; out rows of COLUMNS words."""

    def generate(_context, builder, _signature, arguments):
        codes, code_stride, scales, scale_stride, out = arguments
        rows = []
        for j in range(16):
            table = _table(builder, builder.add(scales, builder.mul(scale_stride, I64(j))))
            low, high = _codes(builder, builder.add(codes, builder.mul(code_stride, I64(j))))
            rows.append(_pair(builder, _looked_up(builder, table, low), _looked_up(builder, table, high)))
        for k, row in enumerate(_transposed(builder, rows)):
            builder.store(row, pointer(builder, out, 4 * COLUMNS * k, PAIRS), align=4)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def _along(context, codes, code_stride, scales, scale_stride, out):  # pragma: no cover - compiled
    """out[j] = (W[0, j], W[1, j]) for 32 columns j of one group. Addresses and strides in bytes."""

    def generate(_context, builder, _signature, arguments):
        codes, code_stride, scales, scale_stride, out = arguments
        found = []
        for i in (0, 1):
            table = _table(builder, builder.add(scales, builder.mul(scale_stride, I64(i))))
            low, high = _codes(builder, builder.add(codes, builder.mul(code_stride, I64(i))))
            found.append((_looked_up(builder, table, low), _looked_up(builder, table, high)))
        even, odd = (_pair(builder, upper, lower) for upper, lower in zip(*found, strict=True))
        for first in (0, 8):
            order = ir.Constant(PAIRS, [first + i // 2 + 16 * (i % 2) for i in range(16)])
            builder.store(builder.shuffle_vector(even, odd, order), pointer(builder, out, 8 * first, PAIRS), align=4)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@serial
def across(codes, scales, half, first, panel):
    """panel[k, j] = (W[first + j, 2k], W[first + j, 2k + 1]) for k < B. codes uint8 [N, B], scales uint16 [N, G], panel uint32 [>= B, COLUMNS]."""
    for begin in range(0, codes.shape[1], CHUNK):
        for j in range(0, COLUMNS, 16):
            here = codes.ctypes.data + (first + j) * codes.strides[0] + begin
            scale = scales.ctypes.data + (first + j) * scales.strides[0] + begin // half * 2
            _across(here, codes.strides[0], scale, scales.strides[0], panel.ctypes.data + 4 * (begin * COLUMNS + j))  # type: ignore[call-arg]


@serial
def along(codes, scales, half, first, panel):
    """panel[k, j] = (W[2k, first + j], W[2k + 1, first + j]) for k < N / 2. Shapes as in `across`, panel [>= N / 2, COLUMNS]."""
    for k in range(codes.shape[0] // 2):
        for begin in range(first // 2, (first + COLUMNS) // 2, CHUNK):
            here = codes.ctypes.data + 2 * k * codes.strides[0] + begin
            scale = scales.ctypes.data + 2 * k * scales.strides[0] + begin // half * 2
            _along(here, codes.strides[0], scale, scales.strides[0], panel.ctypes.data + 4 * (k * COLUMNS + 2 * begin - first))  # type: ignore[call-arg]


@serial
def below(rows, first, panel, begin):
    """panel[begin + k, j] = (rows[2k, first + j], rows[2k + 1, first + j]): bf16 rows [2 · pairs, .] as further pairs of a panel (LoRA's factor)."""
    for k in range(rows.shape[0] // 2):
        upper, lower, words = rows[2 * k, first : first + COLUMNS], rows[2 * k + 1, first : first + COLUMNS], panel[begin + k]
        for j in range(COLUMNS):
            words[j] = np.uint32(np.uint32(upper[j]) | np.uint32(np.uint32(lower[j]) << np.uint32(16)))
