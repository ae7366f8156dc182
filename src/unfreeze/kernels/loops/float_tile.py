"""The inner tile of a float32 GEMM, in LLVM IR, for CPUs without bf16 instructions.

For numba loops that prepare its operands themselves. One operand is read in row-major memory order. The other
is a *strip*: for each inner index WIDTH neighbouring columns.

    out[i, j] += Σ_k a[i, k] strip[k, j]          i < ROWS, j < WIDTH

With AVX2 6 rows by 16 columns take 12 sums of 8. With 2 vectors of the strip and one number of the row they
fill 15 of 16 registers. With AVX512 6 rows by 32 columns take as many registers of 16. The order of a sum is
fixed: bit-identical at every call. Plain LLVM vectors: another CPU compiles the same code for itself.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types

from unfreeze.core import cpu
from unfreeze.kernels.loops.bf16_tile import F32, FLOATS, I64, everywhere, pointer
from unfreeze.kernels.loops.llvm import Value, instruction

ROWS = 6
VECTORS = 2 if cpu.loops_have("cpu-avx512") else 1  # of 16 numbers; AVX2 splits each into two of 8
WIDTH = 16 * VECTORS
INNER = 4096 // WIDTH  # inner indices at a time: that part of a strip is 16 KB, half of a core's L1
BLOCK = 32 * ROWS  # rows at a time: they stay in L2 while strips pass


def multiply_add(builder: ir.IRBuilder, a: Value, b: Value, total: Value) -> Value:
    """a · b + total for sixteen numbers, rounded once if the CPU can."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    add = cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.v16f32")
    return builder.call(add, [a, b, total])


def _places(builder: ir.IRBuilder, out: Value, out_stride: Value) -> list[Value]:
    """Addresses of the tile's vectors in `out`."""
    return [
        pointer(builder, out, builder.add(builder.mul(out_stride, I64(i)), I64(64 * j)), FLOATS)
        for i in range(ROWS)
        for j in range(VECTORS)
    ]


@instruction
def tile(
    context, a, a_stride, strip, strip_stride, inner, fresh, out, out_stride
):  # pragma: no cover - compiled
    """The formula over `inner` indices; `fresh` 1 starts from zero instead of from `out`.

    Addresses and strides in bytes.
    """

    def generate(_context, builder, _signature, arguments):
        a, a_stride, strip, strip_stride, inner, fresh, out, out_stride = arguments
        begin = builder.icmp_signed("!=", fresh, I64(0))
        zero = ir.Constant(FLOATS, [0.0] * 16)
        totals = []
        for place in _places(builder, out, out_stride):
            total = cgutils.alloca_once(builder, FLOATS)
            builder.store(builder.select(begin, zero, builder.load(place, align=4)), total)
            totals.append(total)
        rows = [builder.add(a, builder.mul(a_stride, I64(i))) for i in range(ROWS)]
        with cgutils.for_range(builder, inner) as loop:
            here = builder.mul(loop.index, I64(4))
            at = builder.mul(loop.index, strip_stride)
            columns = [
                builder.load(pointer(builder, strip, builder.add(at, I64(64 * j)), FLOATS), align=4)
                for j in range(VECTORS)
            ]
            for i, row in enumerate(rows):
                lanes = everywhere(builder, builder.load(pointer(builder, row, here, F32), align=4), FLOATS)
                for j, column in enumerate(columns):
                    total = totals[i * VECTORS + j]
                    builder.store(multiply_add(builder, lanes, column, builder.load(total)), total)
        for place, total in zip(_places(builder, out, out_stride), totals, strict=True):
            builder.store(builder.load(total), place, align=4)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate
