"""The inner tile of a bf16 GEMM for CPUs with AVX512-bf16, in LLVM IR.

For numba loops that prepare its operands themselves.

The instruction (vdpbf16ps) multiplies 16 pairs of bf16 and adds each pair's two products to a float32 sum. So
one operand is read as pairs along the inner dimension, in row-major memory order. The other is a *panel*: for
each pair of inner indices 64 words, one per column, two bf16 each.

    out[i, j] = Σ_k a[i, 2k] panel[k, j].low + a[i, 2k + 1] panel[k, j].high          i < ROWS, j < COLUMNS

6 rows by 4 vectors take 24 sums, 4 vectors of the panel and one of the row: 29 of 32 registers, and 24
multiplications for 10 loads. The order of a sum is fixed: bit-identical at every call. numba does not expose
the instruction, hence the LLVM intrinsic.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils, types

from unfreeze.kernels.loops.llvm import Value, instruction

ROWS, VECTORS = 6, 4
COLUMNS = 16 * VECTORS
LINE = 64  # bytes of a cache line

Convert = Callable[[ir.IRBuilder, Value], Value]

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, PAIRS, HALVES = ir.VectorType(F32, 16), ir.VectorType(I32, 16), ir.VectorType(I16, 32)


def pointer(builder: ir.IRBuilder, address: Value, offset: Value | int, kind: ir.Type) -> Value:
    """The pointer to address + offset bytes."""
    offset = I64(offset) if isinstance(offset, int) else offset
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def multiply(builder: ir.IRBuilder, total: Value, a: Value, b: Value) -> Value:
    """total[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1] for sixteen i."""
    kind = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512"),
        [total, a, b],
    )


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOATS = ir.VectorType(_BFloat(), 16)


def narrowed(builder: ir.IRBuilder, wide: Value) -> Value:
    """16 float32 to bf16 by one instruction: to nearest, ties to even; magnitudes under 1e-38 become zero."""
    convert = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(BFLOATS, [FLOATS]), "llvm.x86.avx512bf16.cvtneps2bf16.512"
    )
    return builder.call(convert, [wide])


def zeros(builder: ir.IRBuilder, count: int) -> list[Value]:
    """Zero-initialised vectors of sums; LLVM keeps them in registers."""
    totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(count)]
    for total in totals:
        builder.store(ir.Constant(FLOATS, [0.0] * 16), total)
    return totals


def everywhere(builder: ir.IRBuilder, value: Value, kind: ir.VectorType) -> Value:
    """`value` in every lane."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(PAIRS, [0] * 16))


def _products(builder: ir.IRBuilder, a: Value, a_stride: Value, panel: Value, pairs: Value) -> list[Value]:
    """The formula above: ROWS by VECTORS vectors.

    a: address of ROWS rows, a_stride bytes apart   panel: address of words [pairs, COLUMNS]   pairs: of k
    """
    totals = zeros(builder, ROWS * VECTORS)
    rows = [builder.add(a, builder.mul(a_stride, I64(i))) for i in range(ROWS)]
    with cgutils.for_range(builder, pairs) as loop:
        here = builder.mul(loop.index, I64(4))
        at = builder.mul(loop.index, I64(4 * COLUMNS))
        # panel[k, :]: VECTORS registers of 16 columns
        starts = [builder.add(at, I64(64 * j)) for j in range(VECTORS)]
        columns = [builder.load(pointer(builder, panel, start, PAIRS), align=4) for start in starts]
        # out[i, :] += a[i, 2k : 2k + 2] · panel[k, :], the pair of row i in every lane
        for i, row in enumerate(rows):
            lanes = everywhere(builder, builder.load(pointer(builder, row, here, I32), align=2), PAIRS)
            for j, column in enumerate(columns):
                total = totals[i * VECTORS + j]
                builder.store(multiply(builder, builder.load(total), lanes, column), total)
    return [builder.load(total) for total in totals]


def _write(builder: ir.IRBuilder, arguments: list[Value], kind: ir.Type, size: int, convert: Convert) -> None:
    """The products, each vector converted and stored as `kind` of `size` bytes."""
    a, a_stride, panel, pairs, out, out_stride = arguments
    for i, total in enumerate(_products(builder, a, a_stride, panel, pairs)):
        where = builder.add(builder.mul(out_stride, I64(i // VECTORS)), I64(size * (i % VECTORS)))
        builder.store(convert(builder, total), pointer(builder, out, where, kind), align=2)


@instruction
def tile(context, a, a_stride, panel, pairs, out, out_stride):  # pragma: no cover - compiled
    """The formula over `pairs` pairs, with float32 out. Addresses and strides in bytes."""

    def generate(_context, builder, _signature, arguments):
        _write(builder, arguments, FLOATS, 64, lambda _, total: total)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@instruction
def narrow_tile(context, a, a_stride, panel, pairs, out, out_stride):  # pragma: no cover - compiled
    """The formula, rounded once to bf16 out. Addresses and strides in bytes."""

    def generate(_context, builder, _signature, arguments):
        _write(builder, arguments, BFLOATS, 32, narrowed)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


NEAR, FAR = 3, 2
"""Where a prefetched line goes: to all levels of the cache, or to all but the first."""


def ask(builder: ir.IRBuilder, address: Value, level: int = NEAR) -> None:
    """Prefetch the cache line at `address`, which may lie outside our memory: no read that could fault."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # to read, where to, data
    builder.call(function, [builder.inttoptr(address, byte), I32(0), I32(level), I32(1)])


@instruction
def prefetch(context, address):  # pragma: no cover - compiled
    """Prefetch the cache line at `address`, as `ask`."""

    def generate(_context, builder, _signature, arguments):
        ask(builder, arguments[0])
        return _context.get_dummy_value()

    return types.void(types.int64), generate
