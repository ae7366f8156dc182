"""Tiles of products inside numba loops: a few weight rows times a few rows of x, unpacked in registers.

    out[j, i] = Σ_k w_i[k] x_j[k]            i < rows of the weight, j < rows of x

Two arithmetics, chosen by the type of `like`, a dummy argument:

    float32 (`like` float32)   x is float32. Every 32 elements are stored as 16 even ones, then 16 odd ones,
                               because weights are unpacked in this order ("split order")
    bf16 pairs (`like` uint16)   x is bf16 in memory order; vdpbf16ps multiplies pairs and adds to float32

A chunk is 32 elements; codes.py reads it. Sums are float32 in a fixed order: bit-identical at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from unfreeze.core import cpu
from unfreeze.kernels.decode_step.codes import (
    CHUNK,
    Float32,
    Row,
    at,
    called,
    in_all,
    load,
    merged,
    row,
    to_dtype,
    widened,
)
from unfreeze.kernels.loops.bf16_tile import (
    F32,
    FLOATS,
    I32,
    I64,
    LINE,
    PAIRS,
    ask,
    multiply,
    narrowed,
    zeros,
)
from unfreeze.kernels.loops.llvm import Value, instruction_of_kind

FLOAT32: Any = np.int64(0)
BF16: Any = np.int64(1)
"""Kinds of dense numbers in caches and factors. As int64: numba compiles a loop anew for each literal int."""
AHEAD = 2048  # bytes: four rows of 1,024 weights of 4 bits
CHAINS = 8  # sums that do not wait for each other: a product takes 4 to 6 cycles, one starts in each


def _fma(builder: ir.IRBuilder, total: Value, a: Value, b: Value) -> Value:
    return called(builder, "llvm.fmuladd.v16f32", FLOATS, a, b, total)


def _chunk(
    builder: ir.IRBuilder,
    rows: Sequence[Row],
    xs: Sequence[Value],
    chunk: Value,
    pairs: bool,
    totals: Sequence[Sequence[Value]],
    way: int,
) -> None:
    """Add one chunk's products to `totals`[row · xs + x], each a list of chains; `way`: the first of them."""
    starts = [at(builder, x, chunk, 64 if pairs else 128) for x in xs]
    if pairs and not isinstance(rows[0], Float32):
        weights = [(row.pairs(chunk),) for row in rows]
        read = [(load(builder, x, PAIRS),) for x in starts]
        step = multiply
    else:
        weights = [row.floats(chunk) for row in rows]
        step = _fma
        if pairs:  # float32 weights are not rounded: bf16 x is widened
            read = [widened(builder, load(builder, x, PAIRS)) for x in starts]
        else:
            read = [tuple(load(builder, builder.add(x, I64(64 * h)), FLOATS) for h in (0, 1)) for x in starts]
    for i, weight in enumerate(weights):
        for j, x in enumerate(read):
            chains = totals[i * len(xs) + j]
            for part, (a, b) in enumerate(zip(weight, x, strict=True)):
                total = chains[(way * len(weight) + part) % len(chains)]
                builder.store(step(builder, builder.load(total), a, b), total)


def _sums(builder: ir.IRBuilder, vectors: list[Value]) -> list[Value]:
    """The sum of each vector's 16 lanes: a power of two of vectors, folded together, 3 instructions each."""
    lanes = 16  # of each sum
    count = len(vectors)

    def fold(a: Value, b: Value, width: int) -> Value:
        """Lower halves of each sum's lanes plus the upper ones; `width` lanes of result."""
        half = lanes // 2
        lower = [block * lanes + lane for block in range(width // half) for lane in range(half)]
        masks = [ir.Constant(ir.VectorType(I32, width), [at + shift for at in lower]) for shift in (0, half)]
        low, high = (builder.shuffle_vector(a, b, mask) for mask in masks)
        return builder.fadd(low, high)

    while len(vectors) > 1:
        vectors = [fold(a, b, 16) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        lanes //= 2
    (vector,) = vectors
    while lanes > 1:
        vector = fold(vector, vector, count * lanes // 2)
        lanes //= 2
    return [builder.extract_element(vector, I32(i)) for i in range(count)]


def _tile(
    builder: ir.IRBuilder, kind: str, pairs: bool, num_rows: int, num_xs: int, arguments: list[Value]
) -> None:
    """Products of num_rows weight rows and num_xs rows of x; `arguments`: of `products`."""
    first, stride, scale, scale_stride, table, group, chunks, xs, out, out_stride = arguments[4:]
    ways = max(1, CHAINS // (num_rows * num_xs))

    def at_row(address: Value, stride: Value, i: int) -> Value:
        return builder.add(address, builder.mul(stride, I64(i)))

    rows: list[Row] = []
    for i in range(num_rows):
        codes, scales = at_row(first, stride, i), at_row(scale, scale_stride, i)
        rows.append(row(kind, builder, codes, scales, table, group))
    x = [load(builder, builder.add(xs, I64(8 * j)), I64) for j in range(num_xs)]
    chains = [zeros(builder, ways) for _ in range(num_rows * num_xs)]
    unrolled = ways if pairs and not isinstance(rows[0], Float32) else max(1, ways // 2)
    whole = builder.udiv(chunks, I64(unrolled))
    with cgutils.for_range(builder, whole, intp=I64) as loop:
        for way in range(unrolled):
            chunk = builder.add(builder.mul(loop.index, I64(unrolled)), I64(way))
            _prefetch(builder, rows, first, stride, chunk, way, unrolled)
            _chunk(builder, rows, x, chunk, pairs, chains, way)
    if unrolled > 1:
        done = builder.mul(whole, I64(unrolled))
        with cgutils.for_range_slice(builder, done, chunks, I64(1), intp=I64) as (chunk, _):
            _chunk(builder, rows, x, chunk, pairs, chains, 0)
    totals = [_total(builder, [builder.load(total) for total in each]) for each in chains]
    for place, total in enumerate(_sums(builder, totals)):
        i, j = divmod(place, num_xs)
        where = builder.add(builder.add(out, I64(4 * i)), builder.mul(out_stride, I64(j)))
        builder.store(total, builder.inttoptr(where, F32.as_pointer()), align=4)


def _prefetch(
    builder: ir.IRBuilder, rows: list[Row], first: Value, stride: Value, chunk: Value, way: int, unrolled: int
) -> None:
    """Ask for the codes of rows to come, a cache line at a time.

    From memory, on one Zen 4 core in G weights/s, without and with: INT4, one row and one x 18.4 and 22.7,
    four rows and four x 11.7 and 17.8. bf16 rows gain nothing: the processor foresees one long row by itself.
    """
    size, num_rows = rows[0].size, len(rows)
    each = LINE // size  # chunks of a line
    if not each or size > 32:
        return
    if num_rows > 1:  # the same column of the next rows: all of them once in `num_rows` chunks
        part = builder.and_(chunk, I64(each - 1))
        line = builder.mul(builder.udiv(chunk, I64(each)), I64(LINE))
        for i in range(0, num_rows, each):
            row = builder.mul(builder.add(part, I64(num_rows + i)), stride)
            ask(builder, builder.add(builder.add(first, row), line))
    elif unrolled >= each and way % each == 0:
        ask(builder, builder.add(at(builder, first, chunk, size), I64(AHEAD)))


def _total(builder: ir.IRBuilder, vectors: list[Value]) -> Value:
    while len(vectors) > 1:
        vectors = [builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


@instruction_of_kind
def products(
    context,
    kind,
    like,
    num_rows,
    n,
    codes,
    stride,
    scales,
    scale_stride,
    table,
    group,
    chunks,
    xs,
    out,
    to_next,
):  # pragma: no cover - compiled
    """Products of num_rows weight rows, 1 or 4, and n rows of x, 1 to 4.

    kind          the name of the weights' format (codes.py), a literal
    codes         address of the first row's codes, `stride` bytes to the next row's; scales: the same
    table, group  what the format needs; chunks of one scale as a power of two
    chunks        of a row
    xs, out       address of the n addresses of x (a fourth for n = 3); of float32, `to_next` bytes from
                  the sums of one x to the next
    """

    def generate(context, builder, _signature, arguments):
        num_rows, n = arguments[2:4]
        for count in (1, 4):
            with builder.if_then(builder.icmp_signed("==", num_rows, I64(count))):
                for xs in (1, 2, 4):
                    wanted = ">=" if xs == 4 else "=="
                    with builder.if_then(builder.icmp_signed(wanted, n, I64(min(xs, 3)))):
                        _tile(builder, kind.literal_value, like == types.uint16, count, xs, arguments)
        return context.get_dummy_value()

    return types.void(kind, like, *[types.int64] * 12), generate


@instruction_of_kind
def weights(context, kind, like, codes, scales, table, group, chunk, out):  # pragma: no cover - compiled
    """Write one chunk of a row as 32 float32: the numbers that `products` multiplies."""

    def generate(context, builder, _signature, arguments):
        codes, scales, table, group, chunk, out = arguments[2:]
        one = row(kind.literal_value, builder, codes, scales, table, group)
        narrow = like == types.uint16 and not isinstance(one, Float32)
        even, odd = widened(builder, one.pairs(chunk)) if narrow else one.floats(chunk)
        where = builder.inttoptr(out, ir.VectorType(F32, CHUNK).as_pointer())
        builder.store(merged(builder, even, odd), where, align=4)
        return context.get_dummy_value()

    return types.void(kind, like, *[types.int64] * 6), generate


ROUNDS = ("", "bf16", "f16")


@instruction_of_kind
def weights_of_codes(context, like, rounds, numbers, scale, zero, out):  # pragma: no cover - compiled
    """Write (number - zero) · scale for the 16 numbers of 4 bits, rounded to ROUNDS[rounds].

    numbers, out: addresses of float32 [16]; out is bf16 if `like` is uint16.
    """
    pairs = like == types.uint16

    def generate(context, builder, _signature, arguments):
        rounds, numbers, scale, zero, out = arguments[1:]
        centred = builder.fsub(load(builder, numbers, FLOATS), in_all(builder, zero))
        exact = builder.fmul(centred, in_all(builder, scale))
        for place, dtype in enumerate(ROUNDS):
            if dtype == "f16" and not cpu.loops_have("cpu-avx2"):
                continue
            with builder.if_then(builder.icmp_signed("==", rounds, I64(place))):
                value = to_dtype(builder, exact, dtype)
                value = narrowed(builder, value) if pairs else value
                builder.store(value, builder.inttoptr(out, value.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(like, types.int64, types.int64, types.float32, types.float32, types.int64), generate
