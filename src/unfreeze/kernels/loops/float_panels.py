"""MXFP4 and FP8 weights expanded directly into the panels of `bf16_tile` (panels.py), 64 columns at a time.

Values are the format's, bit for bit, rounded to bf16; but magnitudes under 1e-38 become 0, as they do in the
multiplication.

N rows of W, M columns. `rows` and `columns` are the dimensions of an FP8 block that shares a scale.
"""

from __future__ import annotations

from llvmlite import ir

from unfreeze.kernels.loops.bf16_tile import (
    COLUMNS,
    F32,
    FLOATS,
    I32,
    LINE,
    PAIRS,
    everywhere,
    narrowed,
    prefetch,
)
from unfreeze.kernels.loops.llvm import Value, instruction
from unfreeze.kernels.loops.numba_options import serial
from unfreeze.kernels.loops.panels import AHEAD, BYTES, SHORTS, emit_columns, emit_rows, looked_up
from unfreeze.quant.mxfp4 import E2M1

WEIGHTS = 32  # at a time
I8 = ir.IntType(8)


def word(value: int) -> ir.Constant:
    return ir.Constant(PAIRS, [value] * 16)


def _mxfp4(builder: ir.IRBuilder, codes: Value, scale: Value) -> Value:
    """codes: address of 16 bytes, the low half of each first; scale: address of an exponent + 127.

    A group has 16 possible values, a table in one register. An exponent byte of 0 means 2^-127, a subnormal.
    """
    exponent = builder.zext(builder.load(builder.inttoptr(scale, I8.as_pointer()), align=1), I32)
    zero = builder.icmp_unsigned("==", exponent, I32(0))
    bits = builder.select(zero, I32(1 << 22), builder.shl(exponent, I32(23)))
    factor = everywhere(builder, builder.bitcast(bits, F32), FLOATS)
    values = ir.Constant(FLOATS, [*E2M1, *(-value for value in E2M1)])
    return looked_up(builder, codes, narrowed(builder, builder.fmul(values, factor)))


def _fp8(builder: ir.IRBuilder, codes: Value, scale: Value) -> Value:
    """codes: address of 32 bytes e4m3; scale: address of a float32."""
    factor = everywhere(builder, builder.load(builder.inttoptr(scale, F32.as_pointer()), align=4), FLOATS)
    halves = []
    for first in (0, 16):
        address = builder.add(codes, ir.Constant(codes.type, first))
        byte = builder.zext(builder.load(builder.inttoptr(address, BYTES.as_pointer()), align=1), PAIRS)
        number = builder.fmul(e4m3(builder, byte), factor)
        halves.append(builder.bitcast(narrowed(builder, number), SHORTS))
    low, high = halves
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 32), list(range(32))))


def e4m3(builder: ir.IRBuilder, byte: Value) -> Value:
    """Convert e4m3 bytes to float32, 16 lanes: shifted bits; without an exponent, 2^-9 times the mantissa.

    kernels/expand/numba_cpu.py has the formula.
    """
    low = builder.and_(byte, word(127))
    normal = builder.add(builder.shl(low, word(20)), word(0x3C000000))
    tiny = builder.fmul(builder.sitofp(low, FLOATS), ir.Constant(FLOATS, [2.0**-9] * 16))
    size = builder.select(builder.icmp_unsigned("<", low, word(8)), builder.bitcast(tiny, PAIRS), normal)
    size = builder.select(builder.icmp_unsigned("==", low, word(127)), word(0x7FC00000), size)
    sign = builder.shl(builder.and_(byte, word(128)), word(24))
    return builder.bitcast(builder.or_(size, sign), FLOATS)


@instruction
def _mxfp4_rows(context, codes, code_stride, scales, scale_stride, out):  # pragma: no cover - compiled
    return emit_rows(_mxfp4)


@instruction
def _mxfp4_columns(context, codes, code_stride, scales, scale_stride, out):  # pragma: no cover - compiled
    return emit_columns(_mxfp4)


@instruction
def _fp8_rows(context, codes, code_stride, scales, scale_stride, out):  # pragma: no cover - compiled
    return emit_rows(_fp8)


@instruction
def _fp8_columns(context, codes, code_stride, scales, scale_stride, out):  # pragma: no cover - compiled
    return emit_columns(_fp8)


@serial
def pack_mxfp4_rows(codes, scales, first, panel):
    """panel[k, j] = (W[first + j, 2k], W[first + j, 2k + 1]) for k < M / 2.

    codes uint8 [N, M / 2], scales uint8 [N, M / 32], panel uint32 [>= M / 2, COLUMNS].
    """
    for g in range(scales.shape[1]):
        for j in range(0, COLUMNS, 16):
            here = codes.ctypes.data + (first + j) * codes.strides[0] + 16 * g
            scale = scales.ctypes.data + (first + j) * scales.strides[0] + g
            if g % 4 == 0:  # a cache line of codes
                for i in range(16):
                    prefetch(here + (COLUMNS + i) * codes.strides[0])
            target = panel.ctypes.data + 4 * (16 * g * COLUMNS + j)
            _mxfp4_rows(here, codes.strides[0], scale, scales.strides[0], target)


@serial
def pack_mxfp4_columns(codes, scales, first, panel):
    """panel[k, j] = (W[2k, first + j], W[2k + 1, first + j]) for k < N / 2; shapes as in pack_mxfp4_rows."""
    for k in range(codes.shape[0] // 2):
        for column in range(first, first + COLUMNS, WEIGHTS):
            here = codes.ctypes.data + 2 * k * codes.strides[0] + column // 2
            scale = scales.ctypes.data + 2 * k * scales.strides[0] + column // WEIGHTS
            if column == first:
                for i in range(2):
                    prefetch(here + (AHEAD + i) * codes.strides[0])
            target = panel.ctypes.data + 4 * (k * COLUMNS + column - first)
            _mxfp4_columns(here, codes.strides[0], scale, scales.strides[0], target)


@serial
def pack_fp8_rows(codes, scales, rows, columns, first, panel):
    """As pack_mxfp4_rows: codes uint8 [N, M], scales float32 of blocks.

    `rows` is 1 or a multiple of 16, `columns` a multiple of 32 or at least M.
    """
    stride = scales.strides[0] if rows == 1 else 0
    for column in range(0, codes.shape[1], WEIGHTS):
        for j in range(0, COLUMNS, 16):
            here = codes.ctypes.data + (first + j) * codes.strides[0] + column
            scale = scales.ctypes.data + (first + j) // rows * scales.strides[0] + column // columns * 4
            if column % LINE == 0:
                for i in range(16):
                    prefetch(here + (COLUMNS + i) * codes.strides[0])
            target = panel.ctypes.data + 4 * (column // 2 * COLUMNS + j)
            _fp8_rows(here, codes.strides[0], scale, stride, target)


@serial
def pack_fp8_columns(codes, scales, rows, columns, first, panel):
    """As pack_mxfp4_columns; codes, scales and blocks as in pack_fp8_rows."""
    stride = scales.strides[0] if rows == 1 else 0
    for k in range(codes.shape[0] // 2):
        for column in range(first, first + COLUMNS, WEIGHTS):
            here = codes.ctypes.data + 2 * k * codes.strides[0] + column
            scale = scales.ctypes.data + 2 * k // rows * scales.strides[0] + column // columns * 4
            if column == first:
                for i in range(2):
                    prefetch(here + (AHEAD + i) * codes.strides[0])
            target = panel.ctypes.data + 4 * (k * COLUMNS + column - first)
            _fp8_columns(here, codes.strides[0], scale, stride, target)
