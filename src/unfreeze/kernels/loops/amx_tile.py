"""Products of bf16 by a matrix unit (AMX), in LLVM IR, for numba loops that prepare its operands themselves.

A tile is a register of 16 lines of 64 bytes. One instruction (tdpbf16ps) multiplies two of them:

    c[i, j] += Σ_k a[i, 2k] b[k, j].low + a[i, 2k + 1] b[k, j].high            i, j, k < 16

a: 32 bf16 of 16 rows, in memory order. b: for each pair of inner indices 16 words, one per column, two bf16
each. c: float32. Here a is read from a weight as it lies in memory, and b is made of x (decode_step/wide.py):
so no copy of a weight is made, and it is read once.

The order of a sum is fixed: bit-identical at every call, whatever the number of columns. Denormals count as
zero.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

import ctypes
import functools
import platform

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from unfreeze.core import cpu
from unfreeze.kernels.loops.bf16_tile import FAR, I64, LINE, PAIRS, ask, pointer
from unfreeze.kernels.loops.llvm import Value, instruction

SIDE = 16
"""Lines of a tile, rows of the weight and columns of x that it holds."""
TILE = SIDE * LINE  # bytes
I8 = ir.IntType(8)
AHEAD = 4  # lines of each row of the next block, asked for in 32 steps

_ARCH_PRCTL, _REQUEST, _TILES = (
    158,
    0x1023,
    18,
)  # Linux x86-64: the system call, ARCH_REQ_XCOMP_PERM, tile data


@functools.cache
def available() -> bool:
    """True if numba can compile these instructions and the system lets this process use the registers.

    Linux gives them to a process that asks (Documentation/arch/x86/xstate.rst); threads and children keep it.
    """
    if not cpu.loops_have("cpu-amx") or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILES) == 0


def config() -> np.ndarray:
    """The 64 bytes that say the tiles' sizes: palette 1, eight tiles of 16 lines of 64 bytes."""
    numbers = np.zeros(LINE, np.uint8)
    numbers[0] = 1
    numbers[16:32].view(np.uint16)[:] = LINE
    numbers[48:56] = SIDE
    return numbers


def _tiles(builder: ir.IRBuilder, name: str, *arguments: Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _bytes(builder: ir.IRBuilder, address: Value) -> Value:
    return builder.inttoptr(address, I8.as_pointer())


@instruction
def configure(context, address, before):  # pragma: no cover - compiled
    """Set the tiles' sizes to the 64 bytes at `address`, those they had go to `before`.

    Other libraries of the process (oneDNN) set them once and rely on it: give them back with `restore`.
    """

    def generate(_context, builder, _signature, arguments):
        _tiles(builder, "sttilecfg", _bytes(builder, arguments[1]))
        _tiles(builder, "ldtilecfg", _bytes(builder, arguments[0]))
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@instruction
def restore(context, before):  # pragma: no cover - compiled
    """Set the sizes that `configure` has found."""

    def generate(_context, builder, _signature, arguments):
        _tiles(builder, "ldtilecfg", _bytes(builder, arguments[0]))
        return _context.get_dummy_value()

    return types.void(types.int64), generate


def _ask_ahead(builder: ir.IRBuilder, ahead: Value, stride: Value, step: Value) -> None:
    """In step i: lines AHEAD · (i // 32) … of row i % 32 of the next block."""
    row = builder.add(ahead, builder.mul(stride, builder.and_(step, I64(2 * SIDE - 1))))
    first = builder.mul(builder.udiv(step, I64(2 * SIDE)), I64(AHEAD * LINE))
    for i in range(AHEAD):
        ask(builder, builder.add(builder.add(row, first), I64(LINE * i)), FAR)


def _block(builder: ir.IRBuilder, arguments: list[Value], columns: int) -> None:
    """c for 32 rows of the weight and `columns` tiles of x, 1 or 2. Tiles 0-3: c; 4, 5: a; 6, 7: b."""
    weight, stride, x, x_stride, steps, out, out_stride, ahead = arguments
    line = I64(LINE)
    for tile in range(2 * columns):
        _tiles(builder, "tilezero", I8(tile))
    halves = [builder.add(weight, builder.mul(stride, I64(SIDE * i))) for i in range(2)]
    xs = [builder.add(x, builder.mul(x_stride, I64(j))) for j in range(columns)]
    with cgutils.for_range(builder, steps, intp=I64) as loop:
        here, there = builder.mul(loop.index, line), builder.mul(loop.index, I64(TILE))
        _ask_ahead(builder, ahead, stride, loop.index)
        for i, half in enumerate(halves):
            at = builder.add(half, here)
            _tiles(builder, "tileloadd64", I8(4 + i), _bytes(builder, at), stride)
        for j, start in enumerate(xs):
            _tiles(builder, "tileloadd64", I8(6 + j), _bytes(builder, builder.add(start, there)), line)
        for i in range(2):
            for j in range(columns):
                _tiles(builder, "tdpbf16ps", I8(i * columns + j), I8(4 + i), I8(6 + j))
    for i in range(2):
        for j in range(columns):
            offset = builder.add(builder.mul(out_stride, I64(SIDE * i)), I64(LINE * j))
            _tiles(
                builder,
                "tilestored64",
                I8(i * columns + j),
                _bytes(builder, builder.add(out, offset)),
                out_stride,
            )


@instruction
def block(
    context, weight, stride, x, x_stride, steps, out, out_stride, ahead, columns
):  # pragma: no cover - compiled
    """out[i, j] = w_i · x_j for 32 rows of a weight and 16 or 32 columns of x (`columns` 1 or 2).

    weight, stride   address of the first row, bytes to the next          steps  of 32 inner indices
    x, x_stride      address of a column of tiles, [steps, 16, 16] words; bytes to the next one
    out, out_stride  address of float32 [32, 16 · columns], bytes from row to row

    ahead            address of the block that follows: a part of it, an eighth where its rows are 2 KiB, is
                     prefetched

    So the next block does not begin with an empty pipe to the memory. Its other lines are left to the
    hardware: to ask for all of them takes a fifth longer, to ask for lines of this block gains nothing.
    """

    def generate(_context, builder, _signature, arguments):
        *addresses, columns = arguments
        for count in (1, 2):
            with builder.if_then(builder.icmp_signed("==", columns, I64(count))):
                _block(builder, addresses, count)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@instruction
def transpose(context, source, stride, target, target_stride):  # pragma: no cover - compiled
    """Write a square of 16 by 16 words with rows and columns swapped. Addresses and strides in bytes."""

    def generate(_context, builder, _signature, arguments):
        source, stride, target, target_stride = arguments

        def at(address: Value, step: Value, i: int) -> Value:
            return pointer(builder, builder.add(address, builder.mul(step, I64(i))), 0, PAIRS)

        rows = [builder.load(at(source, stride, i), align=4) for i in range(SIDE)]
        width = 1
        while width < SIDE:  # after each turn squares of 2 · width are swapped
            low = [lane if not lane & width else SIDE + lane - width for lane in range(SIDE)]
            high = [lane + width if not lane & width else SIDE + lane for lane in range(SIDE)]
            masks = [ir.Constant(PAIRS, lanes) for lanes in (low, high)]
            for i in range(SIDE):
                if not i & width:
                    pair = rows[i], rows[i + width]
                    rows[i], rows[i + width] = (builder.shuffle_vector(*pair, mask) for mask in masks)
            width *= 2
        for i, row in enumerate(rows):
            builder.store(row, at(target, target_stride, i), align=4)
        return _context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
