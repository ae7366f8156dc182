"""Weights of each format become numbers in registers, 32 at a time (a chunk). LLVM IR, for dots.py.

A class per kind of codes, with an instance per row. `floats` gives the even and the odd elements of a chunk
as float32, rounded as the format says; `pairs` 16 words of two neighbouring elements, rounded to bf16 as in a
bf16 model. KINDS has their names.

    float32, bf16          dense rows
    int4, mxfp4            4 bits. The 16 weights that a scale allows come from a table of all scales
                           (lookup.py), and a permutation picks from them
    nvfp4                  the same with two scales a chunk, each times the 16 numbers of e2m1
    affine4, upper4        (number[code] - zero) · scale, 16 of them per scale; upper4: the upper half of a
                           byte comes first
    fp8, mxfp8             e4m3 · scale. A code's bits, moved, are those of a float32 2^-120 times as large
    affine8, signed8       (code - zero) · scale for codes of 0 … 255, or -128 … 127
    int8                   (code · scale) / 127, two roundings: LLM.int8

A name may end in the dtype that the format rounds a weight to: "fp8 bf16"; else it is float32.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

from unfreeze.core import cpu
from unfreeze.kernels.loops.bf16_tile import BFLOATS, F32, FLOATS, HALVES, I16, I32, I64, PAIRS, narrowed
from unfreeze.kernels.loops.llvm import Value
from unfreeze.quant.bitsandbytes import INVERSE_127
from unfreeze.quant.mxfp4 import E2M1

CHUNK = 32
EVEN = ir.Constant(PAIRS, list(range(0, CHUNK, 2)))
ODD = ir.Constant(PAIRS, list(range(1, CHUNK, 2)))
MIXED = ir.Constant(ir.VectorType(I32, CHUNK), [i // 2 + i % 2 * 16 for i in range(CHUNK)])
HALF, BYTE = ir.HalfType(), ir.IntType(8)
FP4 = ir.Constant(FLOATS, [*E2M1, *(-value for value in E2M1)])


def every(value: int) -> ir.Constant:
    """The word in each of 16 lanes."""
    return ir.Constant(PAIRS, [value] * 16)


def constant(value: float) -> ir.Constant:
    """The float32 in each of 16 lanes."""
    return ir.Constant(FLOATS, [value] * 16)


def load(builder: ir.IRBuilder, address: Value, kind: ir.Type) -> Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def at(builder: ir.IRBuilder, address: Value, index: Value, size: int) -> Value:
    return builder.add(address, builder.mul(index, I64(size)))


def called(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: Value) -> Value:
    """An instruction by its name in LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def widened(builder: ir.IRBuilder, pairs: Value) -> tuple[Value, Value]:
    """16 pairs of bf16 as float32: (even ones, odd ones)."""
    low = builder.bitcast(builder.shl(pairs, every(16)), FLOATS)
    return low, builder.bitcast(builder.and_(pairs, every(0xFFFF0000)), FLOATS)


def merged(builder: ir.IRBuilder, even: Value, odd: Value) -> Value:
    """32 elements in order."""
    return builder.shuffle_vector(even, odd, MIXED)


def narrowed_twice(builder: ir.IRBuilder, first: Value, second: Value) -> Value:
    """The bits of 16 float32 and 16 more as 32 bf16: to nearest, ties to even."""
    kind = ir.VectorType(BFLOATS.element, CHUNK)
    both = called(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, second, first)
    return builder.bitcast(both, HALVES)


def in_all(builder: ir.IRBuilder, value: Value) -> Value:
    """A float32 in each of 16 lanes."""
    nothing = ir.Constant(FLOATS, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, I32(0)), nothing, every(0))


def to_dtype(builder: ir.IRBuilder, value: Value, dtype: str) -> Value:
    """float32 rounded to "bf16" or "f16" and widened again: to nearest, ties to even; "" leaves it."""
    if dtype == "bf16":
        bits = builder.bitcast(value, PAIRS)
        odd = builder.and_(builder.lshr(bits, every(16)), every(1))
        up = builder.add(bits, builder.add(odd, every(0x7FFF)))
        return builder.bitcast(builder.and_(up, every(0xFFFF0000)), FLOATS)
    if dtype == "f16":
        return builder.fpext(builder.fptrunc(value, ir.VectorType(HALF, 16)), FLOATS)
    return value


def _picked(builder: ir.IRBuilder, tables: Sequence[Value], index: Value) -> Value:
    """tables[…][index & 15]: one table of 16 float32, or one for each half of the 16 lanes."""
    if not cpu.loops_have("cpu-avx512"):
        low, high = (_picked_by_eight(builder, tables[half % len(tables)], index, half) for half in (0, 1))
        return builder.shuffle_vector(low, high, ir.Constant(PAIRS, list(range(16))))
    if len(tables) == 1:  # the permutation reads the low 4 bits of a lane
        return called(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, tables[0], index)
    second = ir.Constant(PAIRS, [0] * 8 + [16] * 8)
    index = builder.or_(builder.and_(index, every(15)), second)
    return called(builder, "llvm.x86.avx512.vpermi2var.ps.512", FLOATS, tables[0], index, tables[1])


def _picked_by_eight(builder: ir.IRBuilder, table: Value, index: Value, half: int) -> Value:
    """The same for lanes 0 to 7 (half 0) or 8 to 15, without 512-bit permutations."""
    eight, words = ir.VectorType(F32, 8), ir.VectorType(I32, 8)
    low, high = (ir.Constant(words, list(range(first, first + 8))) for first in (0, 8))
    lanes = builder.shuffle_vector(index, index, (low, high)[half])
    if not cpu.loops_have("cpu-avx2"):
        out: Value = ir.Constant(eight, ir.Undefined)
        for lane in range(8):
            one = builder.and_(builder.extract_element(lanes, I32(lane)), I32(15))
            out = builder.insert_element(out, builder.extract_element(table, one), I32(lane))
        return out
    permute = "llvm.x86.avx2.permps"  # reads the low 3 bits of a lane
    first, second = (
        called(builder, permute, eight, builder.shuffle_vector(table, table, part), lanes)
        for part in (low, high)
    )
    fourth = builder.and_(lanes, ir.Constant(words, [8] * 8))
    return builder.select(builder.icmp_unsigned("!=", fourth, ir.Constant(words, [0] * 8)), second, first)


class Row:
    """A row of weights: addresses of its codes and scales.

    size    bytes of a chunk's codes
    group   chunks of a scale as a power of two
    rounds  the dtype that the format rounds a weight to, "bf16" or "f16"; "" for float32
    """

    size = 16

    def __init__(
        self, builder: ir.IRBuilder, codes: Value, scales: Value, table: Value, group: Value, rounds: str
    ):
        self.builder, self.codes, self.scales = builder, codes, scales
        self.table, self.group, self.rounds = table, group, rounds

    def floats(self, chunk: Value) -> tuple[Value, Value]:
        raise NotImplementedError

    def pairs(self, chunk: Value) -> Value:
        even, odd = self.floats(chunk)
        halves = narrowed_twice(self.builder, even, odd)
        return self.builder.bitcast(self.builder.shuffle_vector(halves, halves, MIXED), PAIRS)

    def _load(self, chunk: Value, kind: ir.Type) -> Value:
        return load(self.builder, at(self.builder, self.codes, chunk, self.size), kind)

    def _scale(self, chunk: Value, size: int, kind: ir.Type = F32, offset: int = 0) -> Value:
        """The number at `offset` in the `size` bytes of a chunk's scale."""
        where = at(self.builder, self.scales, self.builder.lshr(chunk, self.group), size)
        return load(self.builder, self.builder.add(where, I64(offset)), kind)


class Float32(Row):
    size = 128

    def floats(self, chunk: Value) -> tuple[Value, Value]:
        both = self._load(chunk, ir.VectorType(F32, CHUNK))
        return self.builder.shuffle_vector(both, both, EVEN), self.builder.shuffle_vector(both, both, ODD)


class Bf16(Row):
    size = 64

    def floats(self, chunk: Value) -> tuple[Value, Value]:
        return widened(self.builder, self._load(chunk, PAIRS))

    def pairs(self, chunk: Value) -> Value:
        return self._load(chunk, PAIRS)


class _Nibbles(Row):
    """Codes of 4 bits: the low half of a byte first."""

    upper_first = False

    def values(self, chunk: Value) -> list[Value]:
        """The 16 weights of the chunk's scale as float32; or of its two scales."""
        raise NotImplementedError

    def halves(self, chunk: Value) -> Value:
        """The same as bf16, 32 of them."""
        both = narrowed(self.builder, self.values(chunk)[0])
        return self._twice(self.builder.bitcast(both, ir.VectorType(I16, 16)))

    def floats(self, chunk: Value) -> tuple[Value, Value]:
        tables, low = self.values(chunk), self._bytes(chunk)
        parts = [_picked(self.builder, tables, index) for index in (low, self.builder.lshr(low, every(4)))]
        return (parts[1], parts[0]) if self.upper_first else (parts[0], parts[1])

    def pairs(self, chunk: Value) -> Value:
        values = self.halves(chunk)
        index = self.builder.bitcast(self._index(self._bytes(chunk)), HALVES)
        picked = called(self.builder, "llvm.x86.avx512.permvar.hi.512", HALVES, values, index)
        return self.builder.bitcast(picked, PAIRS)

    def _bytes(self, chunk: Value) -> Value:
        """A chunk's bytes as 16 words."""
        return self.builder.zext(self._load(chunk, ir.VectorType(BYTE, 16)), PAIRS)

    def _index(self, low: Value) -> Value:
        """Both codes of a byte in the halves of its word; bits from the fifth of a half on do not matter."""
        if self.upper_first:
            return self.builder.or_(self.builder.lshr(low, every(4)), self.builder.shl(low, every(16)))
        return self.builder.or_(low, self.builder.shl(low, every(12)))

    def _twice(self, values: Value) -> Value:
        """16 numbers in a register twice: an index of 5 bits may have any fifth bit."""
        places = ir.Constant(ir.VectorType(I32, 32), [*range(16), *range(16)])
        return self.builder.shuffle_vector(values, values, places)


class Int4(_Nibbles):
    """Scales are the bits of bf16; `table` has 16 weights for each (lookup.py)."""

    scale = I16

    def values(self, chunk: Value) -> list[Value]:
        return [load(self.builder, at(self.builder, self.table, self._row(chunk), 64), FLOATS)]

    def halves(self, chunk: Value) -> Value:
        where = at(self.builder, self.table, self._row(chunk), 32)
        return self._twice(load(self.builder, where, ir.VectorType(I16, 16)))

    def _row(self, chunk: Value) -> Value:
        return self.builder.zext(self._scale(chunk, self.scale.width // 8, self.scale), I64)


class Mxfp4(Int4):
    """Scales are exponents of one byte."""

    scale = BYTE


class Nvfp4(_Nibbles):
    """Two scales a chunk, of one byte; `table` has the factor that each stands for, float32 [256]."""

    def values(self, chunk: Value) -> list[Value]:
        if self.rounds != "bf16" or not cpu.loops_have("cpu-avx512-bf16"):
            return [to_dtype(self.builder, value, self.rounds) for value in self._exact(chunk)]
        # one instruction rounds both: 9.5 instead of 13 G weights/s
        halves, parts = self.halves(chunk), (list(range(16)), list(range(16, CHUNK)))
        words = [self.builder.shuffle_vector(halves, halves, ir.Constant(PAIRS, part)) for part in parts]
        wide = [self.builder.shl(self.builder.zext(word, PAIRS), every(16)) for word in words]
        return [self.builder.bitcast(word, FLOATS) for word in wide]

    def halves(self, chunk: Value) -> Value:
        first, second = self._exact(chunk)
        return narrowed_twice(self.builder, first, second)

    def _index(self, low: Value) -> Value:
        both = self.builder.and_(super()._index(low), every(0x000F000F))
        return self.builder.or_(both, ir.Constant(PAIRS, [0] * 8 + [0x00100010] * 8))

    def _exact(self, chunk: Value) -> list[Value]:
        return [self.builder.fmul(FP4, in_all(self.builder, self._factor(chunk, i))) for i in range(2)]

    def _factor(self, chunk: Value, place: int) -> Value:
        code = self.builder.zext(self._scale(chunk, 2, BYTE, place), I64)
        return load(self.builder, at(self.builder, self.table, code, 4), F32)


class Affine4(_Nibbles):
    """Scales are pairs (scale, zero) of float32; `table` has the 16 numbers of the codes, float32."""

    def values(self, chunk: Value) -> list[Value]:
        scale, zero = self._scale(chunk, 8), self._scale(chunk, 8, offset=4)
        numbers = load(self.builder, self.table, FLOATS)
        centred = self.builder.fsub(numbers, in_all(self.builder, zero))
        return [to_dtype(self.builder, self.builder.fmul(centred, in_all(self.builder, scale)), self.rounds)]


class Upper4(Affine4):
    upper_first = True


class _Bytes(Row):
    """Codes of 8 bits, times a float32."""

    size = 32

    def floats(self, chunk: Value) -> tuple[Value, Value]:
        words = self.builder.zext(self._load(chunk, ir.VectorType(I16, 16)), PAIRS)
        even, odd = (self.scaled(chunk, self.number(words, shift)) for shift in (24, 16))
        return even, odd

    def number(self, words: Value, shift: int) -> Value:
        """The number of the code that is the upper byte of a word shifted left; lower bits are any."""
        raise NotImplementedError

    def scaled(self, chunk: Value, number: Value) -> Value:
        exact = self.builder.fmul(number, in_all(self.builder, self.factor(chunk)))
        return to_dtype(self.builder, exact, self.rounds)

    def factor(self, chunk: Value) -> Value:
        return self._scale(chunk, 4)


class Fp8(_Bytes):
    """Scales are float32, already times 2^120."""

    def number(self, words: Value, shift: int) -> Value:
        up = self.builder.shl(words, every(shift))
        # a sign, then 4 bits of exponent and 3 of mantissa where float32 has their like
        moved = self.builder.and_(self.builder.ashr(up, every(4)), every(0x87F00000))
        return self.builder.bitcast(moved, FLOATS)

    def pairs(self, chunk: Value) -> Value:
        """In order from the start: a byte a word needs no shift to the right, halves no exchange."""
        bytes_ = self._load(chunk, ir.VectorType(BYTE, CHUNK))
        parts: list[Value] = []
        for first in (0, 16):
            lanes = ir.Constant(PAIRS, list(range(first, first + 16)))
            words = self.builder.sext(self.builder.shuffle_vector(bytes_, bytes_, lanes), PAIRS)
            moved = self.builder.and_(self.builder.shl(words, every(20)), every(0x87F00000))
            parts.append(self.scaled(chunk, self.builder.bitcast(moved, FLOATS)))
        return self.builder.bitcast(narrowed_twice(self.builder, *parts), PAIRS)


class Mxfp8(Fp8):
    """Scales are bytes; `table` has the factor that each stands for, float32 [256], already times 2^120."""

    def factor(self, chunk: Value) -> Value:
        code = self.builder.zext(self._scale(chunk, 1, BYTE), I64)
        return load(self.builder, at(self.builder, self.table, code, 4), F32)


class Affine8(_Bytes):
    """Scales are pairs (scale, zero) of float32."""

    signed = False

    def number(self, words: Value, shift: int) -> Value:
        up = self.builder.shl(words, every(shift))
        code = self.builder.ashr(up, every(24)) if self.signed else self.builder.lshr(up, every(24))
        return self.builder.sitofp(code, FLOATS)

    def scaled(self, chunk: Value, number: Value) -> Value:
        zero = self._scale(chunk, 8, offset=4)
        return super().scaled(chunk, self.builder.fsub(number, in_all(self.builder, zero)))

    def factor(self, chunk: Value) -> Value:
        return self._scale(chunk, 8)


class Signed8(Affine8):
    signed = True


class Int8(Signed8):
    def scaled(self, chunk: Value, number: Value) -> Value:
        exact = self.builder.fmul(number, in_all(self.builder, self._scale(chunk, 4)))
        return self.builder.fmul(exact, constant(INVERSE_127))


KINDS: dict[str, type[Row]] = {
    "float32": Float32,
    "bf16": Bf16,
    "int4": Int4,
    "mxfp4": Mxfp4,
    "nvfp4": Nvfp4,
    "affine4": Affine4,
    "upper4": Upper4,
    "fp8": Fp8,
    "mxfp8": Mxfp8,
    "affine8": Affine8,
    "signed8": Signed8,
    "int8": Int8,
}


def row_class(kind: str) -> type[Row]:
    """A name of KINDS; after a space the dtype that the format rounds to."""
    return KINDS[kind.partition(" ")[0]]


def row(kind: str, builder: ir.IRBuilder, codes: Value, scales: Value, table: Value, group: Value) -> Row:
    return row_class(kind)(builder, codes, scales, table, group, kind.partition(" ")[2])
