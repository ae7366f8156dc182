"""Counters that the threads of a loop share, and memory by its address. Inside numba loops only.

All accesses to a counter are sequentially consistent, so what a thread wrote before it raised a counter is
seen by a thread that reads the counter.
"""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.np.numpy_support import carray

from unfreeze.kernels.loops.bf16_tile import I32, I64
from unfreeze.kernels.loops.llvm import instruction
from unfreeze.kernels.loops.numba_options import inlined

X86 = platform.machine().lower() in ("x86_64", "amd64")
YIELDS = bool(binding.address_of_symbol("sched_yield"))


@instruction
def fetch_add(context, address, amount):  # pragma: no cover - compiled
    """Add to the int64 at `address`; return its value before."""

    def generate(_context, builder, _signature, arguments):
        where = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", where, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@instruction
def read(context, address):  # pragma: no cover - compiled
    """Value of the int64 at `address`, read anew at each call."""

    def generate(_context, builder, _signature, arguments):
        where = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.load_atomic(where, "seq_cst", 8)

    return types.int64(types.int64), generate


@instruction
def pause(context):  # pragma: no cover - compiled
    """Tell the core that this thread spins."""

    def generate(_context, builder, _signature, arguments):
        if X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return _context.get_dummy_value()

    return types.void(), generate


@instruction
def give_way(context):  # pragma: no cover - compiled
    """Let another thread have this core, if the system can."""

    def generate(_context, builder, _signature, arguments):
        if YIELDS:
            kind = ir.FunctionType(I32, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return _context.get_dummy_value()

    return types.void(), generate


def _pointer(kind: types.Type):
    def pointer(context, address):  # pragma: no cover - compiled
        def generate(_context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], _context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return instruction(pointer)


_floats, _words, _integers = _pointer(types.float32), _pointer(types.uint16), _pointer(types.int64)
_octets, _ints = _pointer(types.uint8), _pointer(types.uint32)


@inlined
def floats(address, size):
    """The `size` float32 at an address."""
    return carray(_floats(np.int64(address)), (size,))


@inlined
def words(address, size):
    """The `size` uint16 at an address: bits of bf16."""
    return carray(_words(np.int64(address)), (size,))


@inlined
def octets(address, size):
    """The `size` bytes at an address."""
    return carray(_octets(np.int64(address)), (size,))


@inlined
def ints(address, size):
    """The `size` uint32 at an address."""
    return carray(_ints(np.int64(address)), (size,))


@inlined
def integers(address, size):
    """The `size` int64 at an address."""
    return carray(_integers(np.int64(address)), (size,))


ARGUMENTS = 32  # int64 of an operation


@instruction
def every(context, address):  # pragma: no cover - compiled
    """The ARGUMENTS int64 at an address, as a tuple: a part of it costs the compiler nothing."""
    result = types.UniTuple(types.int64, ARGUMENTS)

    def generate(_context, builder, _signature, arguments):
        first = builder.inttoptr(arguments[0], I64.as_pointer())
        values = [builder.load(builder.gep(first, [I64(i)])) for i in range(ARGUMENTS)]
        return _context.make_tuple(builder, result, values)

    return result(types.int64), generate
