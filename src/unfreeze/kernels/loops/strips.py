"""Strips of `float_tile` filled from packed or dense weights: the formats, and their shared parts.

A panel is COLUMNS columns of a product as strips [COLUMNS / WIDTH, inner, WIDTH] of float32. Two ways to fill
it from W [N, M], as in panels.py: by rows, for y = x Wᵀ, and by columns, for dx = dy W.

A weight is c · scale, rounded to bf16 if the format's numbers are bf16. That takes no integer arithmetic. c
and the scale have at most 12 bits together, and adding 2^16 times a number to it rounds its last 16 bits
away:

    rounded(c · s) = c · (2^16 + 1) s - c · 2^16 s        both products exact except for that rounding

This holds for s under 2^100 and numbers that are normal in bf16. Without rounding the factors are s and 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types

from unfreeze.kernels.loops.bf16_tile import (
    COLUMNS,
    F32,
    FLOATS,
    I16,
    I32,
    I64,
    PAIRS,
    everywhere,
    pointer,
    prefetch,
)
from unfreeze.kernels.loops.float_panels import I8, e4m3, word
from unfreeze.kernels.loops.float_tile import WIDTH
from unfreeze.kernels.loops.llvm import Value, instruction
from unfreeze.kernels.loops.numba_options import inner
from unfreeze.kernels.loops.panels import AHEAD

Build = Callable[[ir.IRBuilder, Value], Value]


class _Format(NamedTuple):
    """Decoding of sixteen codes into sixteen weights.

    element  the type that is read, `size` bytes with `codes` codes in it, the low half first
    number   16 lanes of codes in 32 bits -> c in float32
    scale    its address -> float32; None if c is the weight
    """

    element: ir.Type
    size: int
    codes: int
    number: Build
    scale: Build | None


def _floats(values: list[float]) -> ir.Constant:
    return ir.Constant(FLOATS, values)


def _int4(builder: ir.IRBuilder, codes: Value) -> Value:
    return builder.sitofp(builder.sub(codes, word(8)), FLOATS)


def _e2m1(builder: ir.IRBuilder, codes: Value) -> Value:
    """kernels/expand/numba_cpu.py has the formula."""
    size = builder.and_(codes, word(7))
    whole = builder.bitcast(builder.add(builder.shl(size, word(22)), word(126 << 23)), FLOATS)
    half = builder.fmul(builder.sitofp(size, FLOATS), _floats([0.5] * 16))
    value = builder.select(builder.icmp_unsigned("<", size, word(2)), half, whole)
    sign = builder.shl(builder.and_(codes, word(8)), word(28))
    return builder.bitcast(builder.or_(builder.bitcast(value, PAIRS), sign), FLOATS)


def _bf16(builder: ir.IRBuilder, bits: Value) -> Value:
    return builder.bitcast(builder.shl(bits, word(16)), FLOATS)


def _float32(builder: ir.IRBuilder, bits: Value) -> Value:
    return builder.bitcast(bits, FLOATS)


def _bf16_scale(builder: ir.IRBuilder, address: Value) -> Value:
    bits = builder.load(builder.inttoptr(address, I16.as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)


def _power_of_two(builder: ir.IRBuilder, address: Value) -> Value:
    """An exponent + 127; 0 means 2^-127, a subnormal."""
    exponent = builder.zext(builder.load(builder.inttoptr(address, I8.as_pointer()), align=1), I32)
    zero = builder.icmp_unsigned("==", exponent, I32(0))
    return builder.bitcast(builder.select(zero, I32(1 << 22), builder.shl(exponent, I32(23))), F32)


def _float_scale(builder: ir.IRBuilder, address: Value) -> Value:
    return builder.load(builder.inttoptr(address, F32.as_pointer()), align=4)


INT4 = _Format(I8, 1, 2, _int4, _bf16_scale)
MXFP4 = _Format(I8, 1, 2, _e2m1, _power_of_two)
FP8 = _Format(I8, 1, 1, e4m3, _float_scale)
BF16 = _Format(I16, 2, 1, _bf16, None)
FLOAT32 = _Format(I32, 4, 1, _float32, None)


def transposed(builder: ir.IRBuilder, rows: list[Value]) -> list[Value]:
    """Transpose 16 vectors of 16: interleave the first eight with the last eight, four times."""
    kind = ir.VectorType(I32, 16)
    low = ir.Constant(kind, [i // 2 + 16 * (i % 2) for i in range(16)])
    high = ir.Constant(kind, [8 + i // 2 + 16 * (i % 2) for i in range(16)])
    for _ in range(4):
        pairs = list(zip(rows[:8], rows[8:], strict=True))
        rows = [builder.shuffle_vector(a, b, order) for a, b in pairs for order in (low, high)]
    return rows


def _factors(builder: ir.IRBuilder, scale: Value, narrow: Value) -> tuple[Value, Value]:
    """The two factors above, for a scale in any number of lanes."""
    many = scale.type != F32

    def constant(value: float) -> ir.Constant:
        return _floats([value] * 16) if many else F32(value)

    rounds = builder.icmp_signed("!=", narrow, I64(0))
    above = builder.select(rounds, builder.fmul(scale, constant(65537.0)), scale)
    return above, builder.select(rounds, builder.fmul(scale, constant(65536.0)), constant(0.0))


def _weights(builder: ir.IRBuilder, number: Value, factors: tuple[Value, Value] | None) -> Value:
    if factors is None:
        return number
    above, below = factors
    return builder.fsub(builder.fmul(number, above), builder.fmul(number, below))


def _emit_rows(form: _Format) -> tuple[Any, Any]:
    """An instruction (codes, code_stride, scales, scale_stride, narrow, out), addresses and strides in bytes.

    out[k, j] = W[j, k] for 16 rows j and the weights k of 16 elements, which share a scale in each row. Rows
    of out have WIDTH numbers.
    """

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[Value]) -> Value:
        codes, code_stride, scales, scale_stride, narrow, out = arguments
        kind, size = ir.VectorType(form.element, 16), form.size
        rows = [
            builder.load(pointer(builder, codes, builder.mul(code_stride, I64(j)), kind), align=size)
            for j in range(16)
        ]
        factors = None
        if form.scale is not None:
            scale: Value = ir.Constant(FLOATS, ir.Undefined)
            for j in range(16):
                one = form.scale(builder, builder.add(scales, builder.mul(scale_stride, I64(j))))
                scale = builder.insert_element(scale, one, I32(j))
            factors = _factors(builder, scale, narrow)
        for i, column in enumerate(transposed(builder, rows)):
            bits = column if size == 4 else builder.zext(column, PAIRS)
            parts = [bits] if form.codes == 1 else [builder.and_(bits, word(15)), builder.lshr(bits, word(4))]
            for k, part in enumerate(parts, start=form.codes * i):
                weights = _weights(builder, form.number(builder, part), factors)
                builder.store(weights, pointer(builder, out, 4 * WIDTH * k, FLOATS), align=4)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _emit_columns(form: _Format) -> tuple[Any, Any]:
    """An instruction (codes, scale, narrow, out, other), all addresses.

    Of 32 weights of a row that share a scale, 16 go to `out`, the others to `other`.
    """

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[Value]) -> Value:
        codes, scale, narrow, *targets = arguments
        count, size = 16 // form.codes, form.size
        factors = None
        if form.scale is not None:
            above, below = _factors(builder, form.scale(builder, scale), narrow)
            factors = everywhere(builder, above, FLOATS), everywhere(builder, below, FLOATS)
        kind = ir.VectorType(form.element, count)
        for half, target in enumerate(targets):
            bits = builder.load(pointer(builder, codes, half * count * size, kind), align=size)
            if form.codes == 2:
                # each byte goes to two lanes, the first of which takes its low half
                twice = ir.Constant(PAIRS, [i // 2 for i in range(16)])
                bits = builder.zext(builder.shuffle_vector(bits, bits, twice), PAIRS)
                bits = builder.and_(builder.lshr(bits, ir.Constant(PAIRS, [0, 4] * 8)), word(15))
            elif size < 4:
                bits = builder.zext(bits, PAIRS)
            weights = _weights(builder, form.number(builder, bits), factors)
            builder.store(weights, builder.inttoptr(target, FLOATS.as_pointer()), align=4)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def rows_of(form: _Format) -> Callable[..., None]:
    """A loop for numba loops: panel[s, k, j] = W[first + s · WIDTH + j, k] for k < M.

    codes [N, M / codes of an element]; scales [., .] of blocks of `rows` by `columns` weights; narrow 1:
    round to bf16; panel float32 [COLUMNS / WIDTH, >= M, WIDTH].
    """

    @instruction
    def fill(context, codes, code_stride, scales, scale_stride, narrow, out):  # pragma: no cover - compiled
        return _emit_rows(form)

    per, step = form.codes, 16 * form.codes

    @inner
    def loop(codes, scales, rows, columns, narrow, first, panel):
        stride = scales.strides[0] if rows == 1 else 0
        for k in range(0, per * codes.shape[1], step):
            for j in range(0, COLUMNS, 16):
                here = codes.ctypes.data + (first + j) * codes.strides[0] + k // per * codes.strides[1]
                scale = (
                    scales.ctypes.data
                    + (first + j) // rows * scales.strides[0]
                    + k // columns * scales.strides[1]
                )
                if k // per * codes.strides[1] % 64 == 0:
                    # prefetch the next panel's: no hardware prefetcher foresees rows so far apart
                    for i in range(16):
                        prefetch(here + (COLUMNS + i) * codes.strides[0])
                at = panel.ctypes.data + j // WIDTH * panel.strides[0] + k * panel.strides[1] + j % WIDTH * 4
                fill(here, codes.strides[0], scale, stride, narrow, at)

    return loop


def columns_of(form: _Format) -> Callable[..., None]:
    """As rows_of: panel[s, k, j] = W[k, first + s · WIDTH + j] for k < N."""

    @instruction
    def fill(context, codes, scale, narrow, out, other):  # pragma: no cover - compiled
        return _emit_columns(form)

    per, other = form.codes, 16 // WIDTH  # 1 if the next 16 columns lie in the next strip

    @inner
    def loop(codes, scales, rows, columns, narrow, first, panel):
        beyond = panel.strides[0] if other else 64
        for k in range(codes.shape[0]):
            for j in range(0, COLUMNS, 32):
                column = first + j
                here = codes.ctypes.data + k * codes.strides[0] + column // per * codes.strides[1]
                scale = (
                    scales.ctypes.data + k // rows * scales.strides[0] + column // columns * scales.strides[1]
                )
                if j == 0:
                    prefetch(here + AHEAD * codes.strides[0])
                at = panel.ctypes.data + j // WIDTH * panel.strides[0] + k * panel.strides[1]
                fill(here, scale, narrow, at, at + beyond)

    return loop


@inner
def append_rows(rows, first, panel, begin):
    """panel[s, begin + k, j] = rows[k, first + s · WIDTH + j]: a LoRA factor below the weights."""
    for s in range(panel.shape[0]):
        for k in range(rows.shape[0]):
            source = rows[k, first + s * WIDTH : first + s * WIDTH + WIDTH]
            for j in range(WIDTH):
                panel[s, begin + k, j] = source[j]


@inner
def fill_strip(rows, begin, panel):
    """panel[0, k, j] = rows[begin + j, k], zero beyond the last row: thin factors, of any count."""
    for j in range(WIDTH):
        if begin + j < rows.shape[0]:
            for k in range(rows.shape[1]):
                panel[0, k, j] = rows[begin + j, k]
        else:
            for k in range(rows.shape[1]):
                panel[0, k, j] = 0
