"""Codes whose rows lie across memory, as rows of words in a buffer: GPTQ's and AWQ's, in LLVM IR.

GPTQ: a word holds neighbouring inputs of one output, and the outputs follow each other. So the words are
transposed. AWQ: a word holds one input of eight outputs, so its half-bytes are transposed as well.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from unfreeze.kernels.decode_step.codes import every, load
from unfreeze.kernels.loops.bf16_tile import I32, I64, PAIRS, ask
from unfreeze.kernels.loops.llvm import Value, instruction
from unfreeze.quant.awq import ORDER

SQUARE = 16
AHEAD = 3  # squares until a row is needed that is asked for: memory takes as long as two
AWQ_INPUTS, AWQ_OUTPUTS = 32, 32
FOUR = ir.VectorType(I32, 4)


def _lanes(*places: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, len(places)), list(places))


@instruction
def transpose(context, source, source_stride, target, target_stride):  # pragma: no cover - compiled
    """16 x 16 words: word j of row i to word i of row j. Asks for rows to come, too."""

    def generate(context, builder, _signature, arguments):
        source, source_stride, target, target_stride = arguments
        rows: list[Value] = []
        for i in range(SQUARE):
            where = builder.add(source, builder.mul(source_stride, I64(i)))
            rows.append(load(builder, where, PAIRS))
            ask(builder, builder.add(where, builder.mul(source_stride, I64(AHEAD * SQUARE))))
        # rows i and i + 8 are mixed word by word, four times
        low = _lanes(*(lane // 2 + lane % 2 * 16 for lane in range(16)))
        high = _lanes(*(8 + lane // 2 + lane % 2 * 16 for lane in range(16)))
        for _ in range(4):
            pairs = zip(rows[:8], rows[8:], strict=True)
            rows = [builder.shuffle_vector(a, b, half) for a, b in pairs for half in (low, high)]
        for i, row in enumerate(rows):
            where = builder.add(target, builder.mul(target_stride, I64(i)))
            builder.store(row, builder.inttoptr(where, PAIRS.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@instruction
def transpose_awq(context, source, source_stride, target, target_stride):  # pragma: no cover - compiled
    """32 inputs of 4 words each, 32 outputs, to 32 rows of 4 words. Asks for inputs to come, too."""

    def generate(context, builder, _signature, arguments):
        source, source_stride, target, target_stride = arguments

        def row_of(address: Value, stride: Value, i: int) -> Value:
            return builder.add(address, builder.mul(stride, I64(i)))

        # vector j: input 8 q + j, words w, in lane 4 q + w
        vectors: list[Value] = []
        for j in range(8):
            quarters: list[Value] = []
            for q in range(4):
                quarters.append(load(builder, row_of(source, source_stride, 8 * q + j), FOUR))
                ask(builder, row_of(source, source_stride, 2 * AWQ_INPUTS + 8 * q + j))
            halves = [builder.shuffle_vector(*quarters[i : i + 2], _lanes(*range(8))) for i in (0, 2)]
            vectors.append(builder.shuffle_vector(*halves, _lanes(*range(16))))
        # 8 x 8 half-bytes: swap halves, bytes, then half-bytes of vectors 4, 2 and 1 apart
        for apart, bits, mask in ((4, 16, 0x0000FFFF), (2, 8, 0x00FF00FF), (1, 4, 0x0F0F0F0F)):
            keep, other = every(mask), every(0xFFFFFFFF ^ mask)
            for j in (j for j in range(8) if not j & apart):
                a, b = vectors[j], vectors[j + apart]
                up = builder.and_(builder.shl(b, every(bits)), other)
                down = builder.and_(builder.lshr(a, every(bits)), keep)
                vectors[j] = builder.or_(builder.and_(a, keep), up)
                vectors[j + apart] = builder.or_(builder.and_(b, other), down)
        # vector p: output 8 w + ORDER[p], eight inputs q, in lane 4 q + w
        for p, vector in enumerate(vectors):
            for w in range(4):
                row = builder.shuffle_vector(vector, vector, _lanes(*(4 * q + w for q in range(4))))
                where = row_of(target, target_stride, 8 * w + ORDER[p])
                builder.store(row, builder.inttoptr(where, FOUR.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
