"""Panels of `bf16_tile` filled from packed or bf16 weights: the parts shared by all formats.

A panel holds rows of COLUMNS bf16 pairs; it stays in a core's L2 cache. Two ways to fill it from W [N, M]:

- by rows, for y = x Wᵀ: the product's columns are rows of W. A pair is two neighbours of a row, and sixteen
  rows have to be transposed.
- by columns, for dx = dy W: the product's columns are columns of W. A pair is two rows, one above the other.

A format defines how 32 neighbouring weights of a row become bf16 (`Weights`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from unfreeze.kernels.loops.bf16_tile import COLUMNS, HALVES, I16, I32, I64, PAIRS, pointer
from unfreeze.kernels.loops.llvm import Value
from unfreeze.kernels.loops.numba_options import serial

AHEAD = 32  # rows to prefetch ahead: 16 steps of packing by columns, about the memory latency
BYTES, SHORTS = ir.VectorType(ir.IntType(8), 16), ir.VectorType(I16, 16)

Weights = Callable[[ir.IRBuilder, Value, Value], Value]
"""(builder, address of the codes of 32 weights, address of their scale) -> 32 lanes of bf16, in order."""


def looked_up(builder: ir.IRBuilder, codes: Value, values: Value) -> Value:
    """32 weights by their 4-bit codes: `codes` is the address of 16 bytes, the low half of each first.

    `values`: the 16 bf16 that a code may mean. Each byte fills one 32-bit lane, which is looked up as two
    16-bit lanes:

        bit   31..20   19..16 | 15..12   11..8   7..4   3..0
              0        high   | low      0       high   low        lane = byte | byte << 12

    The lookup (vpermw) takes the low five bits of each half. In the upper half bit 4 is 0. In the lower half
    it is the lowest bit of `high`, which must not matter: so the register holds the table of 16 values twice.
    """
    once = builder.bitcast(values, SHORTS)
    twice = ir.Constant(ir.VectorType(I32, 32), [*range(16), *range(16)])
    table = builder.shuffle_vector(once, once, twice)
    bytes_ = builder.zext(builder.load(builder.inttoptr(codes, BYTES.as_pointer()), align=1), PAIRS)
    index = builder.bitcast(builder.or_(bytes_, builder.shl(bytes_, ir.Constant(PAIRS, [12] * 16))), HALVES)
    permute = builder.module.declare_intrinsic(
        "llvm.x86.avx512.permvar.hi.512", (), ir.FunctionType(HALVES, (HALVES, HALVES))
    )
    return builder.call(permute, (table, index))


def _transposed(builder: ir.IRBuilder, rows: list[Value]) -> list[Value]:
    """Transpose 16 vectors of 16 words.

    In four rounds, which exchange blocks of 1, 2, 4 and 8 words.
    """
    step = 1
    while step < 16:
        exchanged = list(rows)
        for i in range(16):
            if i & step:
                continue
            first = [lane if not lane & step else 16 + lane - step for lane in range(16)]
            second = [lane + step if not lane & step else 16 + lane for lane in range(16)]
            exchanged[i] = builder.shuffle_vector(rows[i], rows[i + step], ir.Constant(PAIRS, first))
            exchanged[i + step] = builder.shuffle_vector(rows[i], rows[i + step], ir.Constant(PAIRS, second))
        rows, step = exchanged, 2 * step
    return rows


def emit_rows(weights: Weights) -> tuple[Any, Any]:
    """An instruction (codes, code_stride, scales, scale_stride, out), addresses and strides in bytes:

    out[k, j] = (W[j, 2k], W[j, 2k + 1]) for 16 rows j and 16 pairs k that share a scale in each row. out has
    rows of COLUMNS words.
    """

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[Value]) -> Value:
        codes, code_stride, scales, scale_stride, out = arguments
        # 16 rows of 32 weights: one register each, a pair of weights per lane
        rows = []
        for j in range(16):
            here, scale = (
                builder.add(base, builder.mul(stride, I64(j)))
                for base, stride in ((codes, code_stride), (scales, scale_stride))
            )
            rows.append(builder.bitcast(weights(builder, here, scale), PAIRS))
        # rows of the panel are pairs, its columns are rows of W
        for k, row in enumerate(_transposed(builder, rows)):
            builder.store(row, pointer(builder, out, 4 * COLUMNS * k, PAIRS), align=4)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def emit_columns(weights: Weights) -> tuple[Any, Any]:
    """The same arguments: out[j] = (W[0, j], W[1, j]) for 32 columns j that share a scale in each row."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[Value]) -> Value:
        codes, code_stride, scales, scale_stride, out = arguments
        # two rows of 32 weights, one above the other: a pair is a weight of each
        upper = weights(builder, codes, scales)
        lower = weights(builder, builder.add(codes, code_stride), builder.add(scales, scale_stride))
        # interleaved, 16 columns at a time: upper 0, lower 0, upper 1, lower 1, …
        for first in (0, 16):
            order = ir.Constant(ir.VectorType(I32, 32), [first + i // 2 + 32 * (i % 2) for i in range(32)])
            builder.store(
                builder.shuffle_vector(upper, lower, order), pointer(builder, out, 4 * first, HALVES), align=4
            )
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@serial
def pack_bf16_columns(rows, first, panel, begin):
    """panel[begin + k, j] = (rows[2k, first + j], rows[2k + 1, first + j]).

    Appends a LoRA factor, bf16 rows [2 · pairs, .], to a panel as further pairs.
    """
    for k in range(rows.shape[0] // 2):
        upper, lower, words = (
            rows[2 * k, first : first + COLUMNS],
            rows[2 * k + 1, first : first + COLUMNS],
            panel[begin + k],
        )
        for j in range(COLUMNS):
            words[j] = np.uint32(np.uint32(upper[j]) | np.uint32(np.uint32(lower[j]) << np.uint32(16)))
