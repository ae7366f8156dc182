"""Tiles of products inside numba loops: a few weight rows times a few rows of x, unpacked in registers.

    out[j, i] = Σ_k w_i[k] x_j[k]            i < rows of the weight, j < rows of x

Two arithmetics, chosen by the type of `like`, a dummy argument:

    float32 (`like` float32)   x is float32. Every 32 elements are stored as 16 even ones, then 16 odd ones,
                               because weights are unpacked in this order ("split order")
    bf16 pairs (`like` uint16)   x is bf16 in memory order; vdpbf16ps multiplies pairs and adds to float32

A chunk is 32 elements. Kinds of weights:

    FLOAT32, BF16   dense rows
    INT4            16 bytes a chunk, the low half-byte first. A group's 16 possible weights, bf16(scale ·
                    (-8 … 7)), come from a table of all bf16 scales (lookup.py); a permutation picks from them

Sums are float32 in a fixed order: bit-identical at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from unfreeze.core import cpu
from unfreeze.kernels.loops.bf16_tile import F32, FLOATS, I16, I32, I64, LINE, PAIRS, multiply, zeros
from unfreeze.kernels.loops.llvm import Value, instruction

FLOAT32, BF16, INT4 = 0, 1, 2
CHUNK = 32
AHEAD = 2048  # bytes: four rows of 1,024 weights
CHAINS = 8  # sums that do not wait for each other: a product takes 4 to 6 cycles, one starts in each
EVEN = ir.Constant(PAIRS, list(range(0, CHUNK, 2)))
ODD = ir.Constant(PAIRS, list(range(1, CHUNK, 2)))


def _all(value: int) -> ir.Constant:
    return ir.Constant(PAIRS, [value] * 16)


def _load(builder: ir.IRBuilder, address: Value, kind: ir.Type) -> Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _at(builder: ir.IRBuilder, address: Value, index: Value, size: int) -> Value:
    return builder.add(address, builder.mul(index, I64(size)))


def _fma(builder: ir.IRBuilder, total: Value, a: Value, b: Value) -> Value:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.v16f32")
    return builder.call(function, [a, b, total])


def _widened(builder: ir.IRBuilder, pairs: Value) -> tuple[Value, Value]:
    """16 pairs of bf16 as float32: (even ones, odd ones)."""
    low = builder.bitcast(builder.shl(pairs, _all(16)), FLOATS)
    return low, builder.bitcast(builder.and_(pairs, _all(0xFFFF0000)), FLOATS)


class _Row:
    """A weight row: addresses of its codes and scales, and how a chunk of it is read.

    pairs: as 16 words of two bf16; otherwise as two vectors of float32, even and odd elements.
    """

    def __init__(self, kind: int, codes: Value, scales: Value, table: Value, group: Value):
        self.kind, self.codes, self.scales, self.table, self.group = kind, codes, scales, table, group

    def floats(self, builder: ir.IRBuilder, chunk: Value) -> tuple[Value, Value]:
        if self.kind == FLOAT32:
            first = _load(builder, _at(builder, self.codes, chunk, 128), FLOATS)
            second = _load(builder, builder.add(_at(builder, self.codes, chunk, 128), I64(64)), FLOATS)
            return builder.shuffle_vector(first, second, EVEN), builder.shuffle_vector(first, second, ODD)
        if self.kind == BF16:
            return _widened(builder, _load(builder, _at(builder, self.codes, chunk, 64), PAIRS))
        low, high = self._nibbles(builder, chunk)
        if not cpu.loops_have("cpu-avx512"):
            scale = _scale(builder, self._bits(builder, chunk))
            return _rounded(builder, builder.and_(low, _all(15)), scale), _rounded(builder, high, scale)
        values = _load(builder, self._values(builder, chunk, 64), FLOATS)
        kind = ir.FunctionType(FLOATS, (FLOATS, PAIRS))
        permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        # the permutation reads the low 4 bits of a lane
        return builder.call(permute, (values, low)), builder.call(permute, (values, high))

    def pairs(self, builder: ir.IRBuilder, chunk: Value) -> Value:
        if self.kind == BF16:
            return _load(builder, _at(builder, self.codes, chunk, 64), PAIRS)
        # 32 indices of 5 bits: the table of 16 lies in the register twice, so the fifth bit does not matter
        half = ir.VectorType(I16, 16)
        values = _load(builder, self._values(builder, chunk, 32), half)
        both = builder.shuffle_vector(
            values, values, ir.Constant(ir.VectorType(I32, 32), [*range(16), *range(16)])
        )
        low, _ = self._nibbles(builder, chunk)
        halves = ir.VectorType(I16, 32)
        index = builder.bitcast(builder.or_(low, builder.shl(low, _all(12))), halves)
        kind = ir.FunctionType(halves, (halves, halves))
        permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
        return builder.bitcast(builder.call(permute, (both, index)), PAIRS)

    def _nibbles(self, builder: ir.IRBuilder, chunk: Value) -> tuple[Value, Value]:
        """A chunk's bytes as 16 words, and shifted by one nibble."""
        bytes_ = _load(builder, _at(builder, self.codes, chunk, 16), ir.VectorType(ir.IntType(8), 16))
        low = builder.zext(bytes_, PAIRS)
        return low, builder.lshr(low, _all(4))

    def _bits(self, builder: ir.IRBuilder, chunk: Value) -> Value:
        group = builder.lshr(chunk, self.group)
        return builder.zext(_load(builder, _at(builder, self.scales, group, 2), I16), I64)

    def _values(self, builder: ir.IRBuilder, chunk: Value, size: int) -> Value:
        return _at(builder, self.table, self._bits(builder, chunk), size)


def _scale(builder: ir.IRBuilder, bits: Value) -> Value:
    one = builder.bitcast(builder.shl(builder.trunc(bits, I32), I32(16)), F32)
    lane = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), one, I32(0))
    return builder.shuffle_vector(lane, ir.Constant(FLOATS, ir.Undefined), _all(0))


def _rounded(builder: ir.IRBuilder, code: Value, scale: Value) -> Value:
    """bf16(float32(code - 8) · scale) as float32: to nearest, ties to even. `code` int32 0..15."""
    exact = builder.fmul(builder.sitofp(builder.sub(code, _all(8)), FLOATS), scale)
    bits = builder.bitcast(exact, PAIRS)
    odd = builder.and_(builder.lshr(bits, _all(16)), _all(1))
    up = builder.add(bits, builder.add(odd, _all(0x7FFF)))
    return builder.bitcast(builder.and_(up, _all(0xFFFF0000)), FLOATS)


def _chunk(
    builder: ir.IRBuilder,
    rows: Sequence[_Row],
    xs: Sequence[Value],
    chunk: Value,
    pairs: bool,
    totals: Sequence[Sequence[Value]],
    way: int,
) -> None:
    """Add one chunk's products to `totals`[row · xs + x], each a list of chains; `way`: the first of them."""
    if pairs and rows[0].kind != FLOAT32:
        weights = [(row.pairs(builder, chunk),) for row in rows]
        read = [(_load(builder, _at(builder, x, chunk, 64), PAIRS),) for x in xs]
        step = multiply
    elif pairs:  # float32 weights are not rounded: bf16 x is widened
        weights = [row.floats(builder, chunk) for row in rows]
        read = [_widened(builder, _load(builder, _at(builder, x, chunk, 64), PAIRS)) for x in xs]
        step = _fma
    else:
        weights = [row.floats(builder, chunk) for row in rows]
        starts = [_at(builder, x, chunk, 128) for x in xs]
        read = [tuple(_load(builder, builder.add(x, I64(64 * h)), FLOATS) for h in (0, 1)) for x in starts]
        step = _fma
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


def _tile(kind: int, num_rows: int, num_xs: int) -> Callable[..., Any]:
    """The tile of num_rows weight rows and num_xs rows of x, as numba calls it.

    Arguments: like; address of the first row's codes and bytes to the next row's; the same for its scales;
    address of the table of values; chunks of one scale as a power of two; chunks of a row; address of the
    num_xs addresses of x; address of out, float32, and bytes from one x's sums to the next's.
    """
    ways = max(1, CHAINS // (num_rows * num_xs))

    def tile(context, like, codes, stride, scales, scale_stride, table, group, chunks, xs, out, out_stride):
        pairs = like == types.uint16

        def generate(context, builder, _signature, arguments):
            first, stride, scale, scale_stride, table, group, chunks, xs, out, out_stride = arguments[1:]
            rows = []
            for i in range(num_rows):
                codes_i = builder.add(first, builder.mul(stride, I64(i)))
                scales_i = builder.add(scale, builder.mul(scale_stride, I64(i)))
                rows.append(_Row(kind, codes_i, scales_i, table, group))
            x = [_load(builder, builder.add(xs, I64(8 * j)), I64) for j in range(num_xs)]
            chains = [zeros(builder, ways) for _ in range(num_rows * num_xs)]
            unrolled = ways if pairs and kind != FLOAT32 else max(1, ways // 2)
            whole = builder.udiv(chunks, I64(unrolled))
            with cgutils.for_range(builder, whole, intp=I64) as loop:
                for way in range(unrolled):
                    chunk = builder.add(builder.mul(loop.index, I64(unrolled)), I64(way))
                    if kind == INT4:
                        _prefetch(builder, num_rows, first, stride, chunk, way if unrolled >= 4 else None)
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
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 10), generate

    return instruction(tile)


def _prefetch(
    builder: ir.IRBuilder, num_rows: int, first: Value, stride: Value, chunk: Value, way: int | None
) -> None:
    """Ask for the codes of rows to come, a cache line of four chunks at a time.

    From memory, on one Zen 4 core in G weights/s, without and with: one row and one x 18.4 and 22.7, four
    rows and four x 11.7 and 17.8. bf16 rows gain nothing: the processor foresees one long row by itself.
    """
    if num_rows > 1:  # the same column of the next four rows: one line a chunk
        row = builder.mul(builder.add(builder.and_(chunk, I64(3)), I64(num_rows)), stride)
        line = builder.mul(builder.lshr(chunk, I64(2)), I64(LINE))
        where = builder.add(builder.add(first, row), line)
    elif way is not None and way % 4 == 0:
        where = builder.add(_at(builder, first, chunk, 16), I64(AHEAD))
    else:
        return
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # to read, into all levels, data
    builder.call(ask, [builder.inttoptr(where, byte), I32(0), I32(3), I32(1)])


def _total(builder: ir.IRBuilder, vectors: list[Value]) -> Value:
    while len(vectors) > 1:
        vectors = [builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _tiles(kind: int) -> tuple[Callable[..., Any], ...]:
    return tuple(_tile(kind, rows, xs) for rows in (1, 4) for xs in (1, 2, 4))


FLOAT32_TILES, BF16_TILES, INT4_TILES = map(_tiles, (FLOAT32, BF16, INT4))
