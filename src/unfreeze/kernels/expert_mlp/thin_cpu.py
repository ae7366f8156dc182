"""GEMMs with eight or sixteen columns in bf16, on CPUs with AVX512-bf16.

LoRA needs one beside each large GEMM of an expert. For each call oneDNN packs an operand and looks its kernel
up among those of a hundred shapes. That costs more than eight columns of arithmetic and leaves a compiled
kernel behind for each number of rows. Here both operands are read in place. The instruction is the one oneDNN
uses (products of bf16 pairs, summed in float32); numba does not expose it, hence the LLVM intrinsic. Other
CPUs use torch.mm, logged once.

R rows, W the long side, Q columns (a multiple of 8, at most WIDEST).
"""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from torch import Tensor

from unfreeze.kernels.loops import bf16_cpu
from unfreeze.kernels.loops.bf16_tile import (
    F32,
    FLOATS,
    HALVES,
    I32,
    I64,
    PAIRS,
    everywhere,
    multiply,
    pointer,
    zeros,
)
from unfreeze.kernels.loops.llvm import instruction
from unfreeze.kernels.loops.numba_options import array, narrow, serial
from unfreeze.kernels.loops.scratch import scratch

log = logging.getLogger(__name__)
WIDEST = 32  # columns; more than that were not measured
TILE = 4  # rows and columns of a tile of dots: 16 sums and 8 operands are 24 of 32 registers
STRIPE = 32  # columns of a tile of outer products, two vectors


@functools.cache
def available() -> bool:
    """True if this CPU multiplies pairs of bf16; logged once."""
    has_bf16 = bf16_cpu.available()
    log.info(
        "thin GEMMs of expert adapters in bfloat16: %s",
        "read in place" if has_bf16 else "torch.mm (this CPU has no AVX512-bf16)",
    )
    return has_bf16


def supports(a: Tensor, b: Tensor) -> bool:
    """True if rows of both bf16 operands can be read in place."""
    return available() and a.dtype == b.dtype == torch.bfloat16 and a.stride(-1) == 1 and b.stride(-1) == 1


def dots(a_RW: Tensor, b_QW: Tensor, out_RQ: Tensor) -> bool:
    """out[r, q] = Σ_w a[r, w] b[q, w], rounded once to bf16.

    Returns False and does nothing if the loops don't support the shapes.
    """
    columns, width = b_QW.shape
    if width % 32 or columns % TILE or columns > WIDEST or not supports(a_RW, b_QW):
        return False
    sums = scratch("thin dots", (TILE * TILE,), torch.float32, a_RW.device)
    dots_loop(array(a_RW), array(b_QW), array(sums), array(out_RQ))
    return True


def outer(a_RQ: Tensor, b_RW: Tensor, out_QW: Tensor) -> bool:
    """out[q, w] = Σ_r a[r, q] b[r, w] in float32. Returns False and does nothing for unsupported shapes."""
    (rows, columns), width = a_RQ.shape, b_RW.shape[1]
    if (
        rows % 2
        or width % STRIPE
        or columns % 8
        or columns > WIDEST
        or out_QW.dtype != torch.float32
        or not supports(a_RQ, b_RW)
    ):
        return False
    pairs = scratch("thin pairs", (rows // 2, columns), torch.int32, a_RQ.device)
    outer_loop(array(a_RQ), array(b_RW), pairs.view(torch.uint32).numpy(), array(out_QW))
    return True


@instruction
def _tile_of_dots(context, a, a_stride, b, b_stride, steps, out):  # pragma: no cover - compiled
    """out[4 i + j] = Σ_w a[i, w] b[j, w] over 32 · steps numbers.

    Addresses and strides in bytes, out float32.
    """

    def generate(_context, builder, _signature, arguments):
        a, a_stride, b, b_stride, steps, out = arguments
        totals = zeros(builder, TILE * TILE)
        with cgutils.for_range(builder, steps) as loop:
            at = builder.mul(loop.index, I64(64))
            rows, columns = (
                [
                    builder.load(
                        pointer(builder, base, builder.add(at, builder.mul(stride, I64(i))), PAIRS), align=2
                    )
                    for i in range(TILE)
                ]
                for base, stride in ((a, a_stride), (b, b_stride))
            )
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    total = totals[i * TILE + j]
                    builder.store(multiply(builder, builder.load(total), row, column), total)
        add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(F32, [F32, FLOATS]), "llvm.vector.reduce.fadd.v16f32"
        )
        for i, total in enumerate(totals):
            reduced = builder.call(add, [F32(0.0), builder.load(total)], fastmath=("reassoc",))
            builder.store(reduced, pointer(builder, out, 4 * i, F32))
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64), generate


@instruction
# pragma: no cover - compiled
def _tile_of_outer(context, pairs, pairs_stride, b, b_stride, steps, out, out_stride):
    """out[q, :32] = Σ_i pairs[i, q].low · b[2i, :32] + pairs[i, q].high · b[2i + 1, :32] for eight q.

    Addresses, strides in bytes, out float32.
    """

    def generate(_context, builder, _signature, arguments):
        pairs, pairs_stride, b, b_stride, steps, out, out_stride = arguments
        totals = zeros(builder, 16)
        with cgutils.for_range(builder, steps) as loop:
            at = builder.mul(loop.index, builder.mul(b_stride, I64(2)))
            even = builder.load(pointer(builder, b, at, HALVES), align=2)
            odd = builder.load(pointer(builder, b, builder.add(at, b_stride), HALVES), align=2)
            halves = []
            for first in (0, 16):
                order = ir.Constant(
                    ir.VectorType(I32, 32), [first + i // 2 + 32 * (i % 2) for i in range(32)]
                )
                halves.append(builder.bitcast(builder.shuffle_vector(even, odd, order), PAIRS))
            here = builder.mul(loop.index, pairs_stride)
            for q in range(8):
                pair = builder.load(pointer(builder, pairs, builder.add(here, I64(4 * q)), I32))
                lanes = everywhere(builder, pair, PAIRS)
                for i, half in enumerate(halves):
                    total = totals[2 * q + i]
                    builder.store(multiply(builder, builder.load(total), lanes, half), total)
        for q in range(8):
            for i in range(2):
                where = builder.add(builder.mul(out_stride, I64(q)), I64(64 * i))
                builder.store(builder.load(totals[2 * q + i]), pointer(builder, out, where, FLOATS), align=4)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@serial
def dots_loop(a, b, sums, out):
    """`dots` for numba loops."""
    rows, columns = out.shape
    steps, alone = a.shape[1] // 32, rows < 4
    for begin in range(0, rows, 1 if alone else 4):
        # the last tile repeats some rows; with fewer than four, one row four times
        first = begin if alone else min(begin, rows - 4)
        stride, count = (0, 1) if alone else (a.strides[0], 4)
        for column in range(0, columns, 4):
            where = b.ctypes.data + column * b.strides[0]
            _tile_of_dots(
                a.ctypes.data + first * a.strides[0], stride, where, b.strides[0], steps, sums.ctypes.data
            )
            for i in range(count):
                for j in range(4):
                    out[first + i, column + j] = narrow(sums[4 * i + j], out[0, 0])


@serial
def outer_loop(a, b, pairs, out):
    """`outer` for numba loops; pairs [rows / 2, Q] is scratch for a's rows in pairs."""
    steps, columns = pairs.shape
    for i in range(steps):
        for q in range(columns):
            pairs[i, q] = np.uint32(
                np.uint32(a[2 * i, q]) | np.uint32(np.uint32(a[2 * i + 1, q]) << np.uint32(16))
            )
    for stripe in range(0, b.shape[1], 32):
        for q in range(0, columns, 8):
            where = out.ctypes.data + q * out.strides[0] + 4 * stripe
            here = pairs.ctypes.data + 4 * q
            _tile_of_outer(
                here, pairs.strides[0], b.ctypes.data + 2 * stripe, b.strides[0], steps, where, out.strides[0]
            )
