"""Rows of a weight times float32 vectors, inside numba loops. The expanded row is never in memory.

Written in LLVM IR with vectors of 16 lanes, because numba's vectoriser does not recognise table lookups.

INT4: a group of weights has 16 possible values, scale · (-8 … 7), each rounded to bf16 as the format
requires. They fill one 512-bit register, and a 4-bit code picks its value with one instruction (vpermps);
subtracting, scaling and rounding each weight would take ten. Without AVX-512 each weight is computed,
bit-identically.

bf16: the two weights of a 32-bit word are widened by a shift and a mask.

Sums are float32, in a fixed order: bit-identical at every call.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from unfreeze.core import cpu
from unfreeze.kernels.loops.llvm import Value, instruction
from unfreeze.kernels.loops.numba_options import LANES, inner, widen

FLOAT, INT = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)


Read = Callable[[ir.IRBuilder, list[Value], Value], tuple[Value, Value]]
"""_int4 or _bf16: (builder, row, chunk) -> the 32 weights of a chunk, even elements and odd ones."""


def _looks_up() -> bool:
    """True if numba compiles for a machine with vpermps of 16 lanes."""
    return cpu.loops_have("cpu-avx512")


def _int(value: int) -> ir.Constant:
    return ir.Constant(INT, [value] * LANES)


def _splat(builder: ir.IRBuilder, value: Value) -> Value:
    one = builder.insert_element(ir.Constant(FLOAT, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(FLOAT, ir.Undefined), _int(0))


def _rounded(builder: ir.IRBuilder, code: Value, scale: Value) -> Value:
    """bf16(float32(code - 8) · scale) as float32, lane by lane: to nearest, ties to even.

    `code` int32 0..15.
    """
    exact = builder.fmul(builder.sitofp(builder.sub(code, _int(8)), FLOAT), scale)
    bits = builder.bitcast(exact, INT)
    odd = builder.and_(builder.lshr(bits, _int(16)), _int(1))
    return builder.bitcast(
        builder.and_(builder.add(bits, builder.add(odd, _int(0x7FFF))), _int(0xFFFF0000)), FLOAT
    )


def _weights(builder: ir.IRBuilder, bytes_: Value, scale: Value) -> tuple[Value, Value]:
    """32 weights of one group: (those of the low half-bytes, those of the high half-bytes).

    `bytes_` int32 lanes 0..255.
    """
    high = builder.lshr(bytes_, _int(4))
    if not _looks_up():
        return _rounded(builder, builder.and_(bytes_, _int(15)), scale), _rounded(builder, high, scale)
    table = _rounded(builder, ir.Constant(INT, list(range(LANES))), scale)
    permute = builder.module.declare_intrinsic(
        "llvm.x86.avx512.permvar.sf.512", (), ir.FunctionType(FLOAT, (FLOAT, INT))
    )
    # vpermps reads only the low 4 bits of each lane
    return builder.call(permute, (table, bytes_)), builder.call(permute, (table, high))


def _load(builder: ir.IRBuilder, address: Value, offset: Value, kind: Value) -> Value:
    return builder.load(builder.inttoptr(builder.add(address, offset), kind.as_pointer()), align=1)


def _int4(builder: ir.IRBuilder, row: list[Value], chunk: Value) -> tuple[Value, Value]:
    """row: addresses of codes and of scales, chunks, chunks per group.

    A chunk is 16 bytes: 32 weights of one group.
    """
    codes, scales, _, per_group = row
    group = builder.mul(builder.udiv(chunk, per_group), ir.Constant(chunk.type, 2))
    bits = builder.shl(
        builder.zext(_load(builder, scales, group, ir.IntType(16)), ir.IntType(32)),
        ir.Constant(ir.IntType(32), 16),
    )
    scale = _splat(builder, builder.bitcast(bits, ir.FloatType()))
    bytes_ = _load(
        builder,
        codes,
        builder.mul(chunk, ir.Constant(chunk.type, LANES)),
        ir.VectorType(ir.IntType(8), LANES),
    )
    return _weights(builder, builder.zext(bytes_, INT), scale)


def _bf16(builder: ir.IRBuilder, row: list[Value], chunk: Value) -> tuple[Value, Value]:
    """row: address of the weights, unused, chunks. A chunk is 32 weights."""
    pairs = _load(builder, row[0], builder.mul(chunk, ir.Constant(chunk.type, LANES * 4)), INT)
    return builder.bitcast(builder.shl(pairs, _int(16)), FLOAT), builder.bitcast(
        builder.and_(pairs, _int(0xFFFF0000)), FLOAT
    )


def _emit(builder: ir.IRBuilder, read: Read, row: list[Value], xs: list[Value]) -> list[Value]:
    """For each address in xs: the sum over the row. x has even elements first, then odd ones."""
    chunks, word = row[2], row[2].type
    muladd = builder.module.declare_intrinsic(
        "llvm.fmuladd.v16f32", (), ir.FunctionType(FLOAT, (FLOAT, FLOAT, FLOAT))
    )
    zero = ir.Constant(FLOAT, [0.0] * LANES)
    sums = [(cgutils.alloca_once_value(builder, zero), cgutils.alloca_once_value(builder, zero)) for _ in xs]
    odd_half = builder.mul(chunks, ir.Constant(word, LANES * 4))
    with cgutils.for_range(builder, chunks, intp=word) as loop:
        weights = read(builder, row, loop.index)
        even = builder.mul(loop.index, ir.Constant(word, LANES * 4))
        for x, pair in zip(xs, sums, strict=True):
            for weight, begin, total in zip(weights, (even, builder.add(even, odd_half)), pair, strict=True):
                builder.store(
                    builder.call(muladd, (weight, _load(builder, x, begin, FLOAT), builder.load(total))),
                    total,
                )
    return [_sum(builder, builder.fadd(builder.load(low), builder.load(high))) for low, high in sums]


def _sum(builder: ir.IRBuilder, vector: Value) -> Value:
    """Sum 16 lanes: add the upper half to the lower until one lane is left."""
    width = LANES
    while width > 1:
        width //= 2
        parts = [
            builder.shuffle_vector(
                vector,
                vector,
                ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(first, first + width))),
            )
            for first in (0, width)
        ]
        vector = builder.fadd(parts[0], parts[1])
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _typed(typingctx: object, row: types.UniTuple, xs: types.UniTuple):
    """row: an int4 or bf16 row as above, of uintp; xs: a tuple of addresses -> a tuple of sums."""
    result = types.UniTuple(types.float32, xs.count)
    read = _int4 if row.count == 4 else _bf16

    def codegen(context, builder, signature, arguments):
        row_values, x_values = (cgutils.unpack_tuple(builder, packed) for packed in arguments)
        return context.make_tuple(builder, result, _emit(builder, read, row_values, x_values))

    return result(types.UniTuple(types.uintp, row.count), types.UniTuple(types.uintp, xs.count)), codegen


_dots = instruction(_typed)


@numba.njit(inline="always")
def _address(row):
    return np.uintp(row.ctypes.data)


@inner
def int4_row(codes, scales, group_bytes):
    """A weight row for row_dots.

    codes uint8 [in / 2], scales uint16 [groups]; group_bytes a multiple of 16.
    """
    return _address(codes), _address(scales), np.uintp(codes.size // 16), np.uintp(group_bytes // 16)


@inner
def bf16_row(weights):
    """A weight row for row_dots. uint16 [in]; `in` is a multiple of 32."""
    return _address(weights), np.uintp(0), np.uintp(weights.size // 32)


@inner
def row_dots(row, x, rows, out):
    """out[j] = row · x[rows[j]] for all j.

    x float32 [., in] in C order, each row with its even elements first, then the odd ones (halves).
    """
    j = 0
    while j + 4 <= rows.size:
        four = (
            _address(x[rows[j]]),
            _address(x[rows[j + 1]]),
            _address(x[rows[j + 2]]),
            _address(x[rows[j + 3]]),
        )
        out[j], out[j + 1], out[j + 2], out[j + 3] = _dots(row, four)
        j += 4
    left = rows.size - j
    if left == 3:
        three = (_address(x[rows[j]]), _address(x[rows[j + 1]]), _address(x[rows[j + 2]]))
        out[j], out[j + 1], out[j + 2] = _dots(row, three)
    elif left == 2:
        out[j], out[j + 1] = _dots(row, (_address(x[rows[j]]), _address(x[rows[j + 1]])))
    elif left == 1:
        out[j] = _dots(row, (_address(x[rows[j]]),))[0]


@inner
def halves(x, out):
    """out[t] = x[t] (float32 or bf16 bits) as float32, even elements first, then the odd ones.

    Weights are unpacked from a word in this order.
    """
    half = x.shape[1] // 2
    for t in range(x.shape[0]):
        for i in range(half):
            out[t, i], out[t, half + i] = widen(x[t, 2 * i]), widen(x[t, 2 * i + 1])
