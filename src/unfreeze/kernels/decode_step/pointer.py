"""Loops called by their address, from other loops.

Linked the usual way, every operation would contain all the tiles of products, and LLVM would optimise them
anew in each: a minute instead of seconds. So tiles and operations are compiled on their own, once and only if
they are used, kept on disk like all loops, and called through a pointer.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from numba.core import types

from unfreeze.kernels.loops.bf16_tile import I64
from unfreeze.kernels.loops.llvm import instruction
from unfreeze.kernels.loops.numba_options import LINKED, Loop, serial

LIKE = {True: types.uint16, False: types.float32}
"""Type of the argument `like`: bf16 pairs or float32 (dots.py)."""


@contextmanager
def _unbroken() -> Iterator[None]:
    """Ctrl-C waits for the body, some seconds: a callback of LLVM would lose it and leave half a loop."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or former is None:
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if came and callable(former):
        former(*came[0])


class Callee:
    """A loop with arguments (like, int64, …, int64), to be called by address."""

    def __init__(self, function: Loop):
        self.loop: Any = serial(function, LINKED)
        self.arguments = function.__code__.co_argcount - 1
        self._addresses: dict[bool, int] = {}

    def address(self, pairs: bool) -> int:
        """Compile it for one arithmetic, or read it from the cache; return its address in this process."""
        if pairs not in self._addresses:
            signature = (LIKE[pairs], *[types.int64] * self.arguments)
            with _unbroken():
                self.loop.compile(signature)
            compiled = self.loop.overloads[signature]
            name = compiled.fndesc.llvm_func_name
            self._addresses[pairs] = compiled.library.get_pointer_to_function(name)
        return self._addresses[pairs]

    @property
    def compiled(self) -> bool:
        """True if this process compiled it: the cache did not have it."""
        return bool(self.loop.stats.cache_misses)

    @property
    def name(self) -> str:
        """module:name, as another process finds it; "" for a loop that a function made."""
        function = self.loop.py_func
        return "" if "<" in function.__qualname__ else f"{function.__module__}:{function.__qualname__}"


def _call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Call the function at arguments[0] with the others, by numba's convention; 1 if it raised, else 0."""
    kinds, address, *values = signature.args[1:], *arguments
    convention = context.call_conv
    kind = convention.get_function_type(types.none, kinds)
    callee = builder.inttoptr(address, kind.as_pointer())
    status, _ = convention.call_function(builder, callee, types.none, kinds, values)
    return builder.zext(status.is_error, I64)


@instruction
def call_operation(context, address, like, job, rows, a, f):  # pragma: no cover - compiled
    """Run one job of an operation (ops.py)."""
    return types.int64(types.int64, like, *[types.int64] * 4), _call


@instruction
def call_products(
    context,
    address,
    like,
    num_rows,
    step,
    codes,
    stride,
    scales,
    scale_stride,
    table,
    group,
    width,
    xs,
    n,
    out,
):  # pragma: no cover - compiled
    """Run products of a kind of weight (tiles.py)."""
    return types.int64(types.int64, like, *[types.int64] * 12), _call
