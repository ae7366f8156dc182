"""Compiler options of the numba loops in kernels/, conversion of tensors for them, and bf16 inside them.

numba has no bfloat16: a bf16 tensor is passed as the uint16 of its bits, which `widen` and `narrow` convert.
Kernels are compiled at their first call for each dtype. They are cached on disk beside the source, or in the
user's cache if the source folder is read-only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import overload
from torch import Tensor

from unfreeze.kernels.loops.cores import in_runs
from unfreeze.kernels.loops.on_disk import ROOM, sources

log = logging.getLogger(__name__)

Loop = Callable[..., Any]
"""A function of arrays and numbers, compiled by numba or about to be; numba infers their types."""

njit: Any = numba.njit  # its stubs lack forceinline and no_cpython_wrapper
OPTIONS: dict[str, Any] = dict(nogil=True, boundscheck=False, error_model="numpy", no_cfunc_wrapper=True)

# For functions that only loops call: LLVM links them into the loop, and Python cannot call them.
LINKED: dict[str, Any] = OPTIONS | dict(no_cpython_wrapper=True)

# Loops of fewer elements run on one thread: handing a part to a second thread takes about as long as the loop
# (docs/why/decisions.md, 77).
SERIAL = 1 << 18


# For a function of a few numbers: LLVM inlines it before it vectorises loops.
inlined: Callable[[Loop], Loop] = njit(forceinline=True, **LINKED)

LOG2E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693145751953125)  # 12 bits of ln 2: n * LN2_HIGH is exact
LN2_LOW = np.float32(1.42860677e-06)
ONE = np.float32(1.0)
HALF = np.float32(0.5)
LANES = 16  # parallel partial sums: a float sum is vectorised only if the code fixes its order


@inlined
def exp(x):
    """exp(x) in float32 for x within -87 .. 88 (clamped), relative error under 2e-7.

    Written here because numba's own calls the C library for each element, which is not vectorised.
    """
    y = np.float32(min(max(np.float32(x), np.float32(-87.0)), np.float32(88.0)))
    n = np.float32(np.floor(np.float32(np.float32(y * LOG2E) + HALF)))
    r = np.float32(np.float32(y - np.float32(n * LN2_HIGH)) - np.float32(n * LN2_LOW))  # |r| <= ln(2) / 2
    p = np.float32(np.float32(r * np.float32(1 / 720)) + np.float32(1 / 120))
    p = np.float32(np.float32(p * r) + np.float32(1 / 24))
    p = np.float32(np.float32(p * r) + np.float32(1 / 6))
    p = np.float32(np.float32(p * r) + HALF)
    p = np.float32(np.float32(p * r) + ONE)
    p = np.float32(np.float32(p * r) + ONE)
    return np.float32(p * np.uint32(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23)).view(np.float32))


@inlined
def sigmoid(x):
    """1 / (1 + exp(-x)), relative error under 3e-7."""
    return np.float32(ONE / np.float32(ONE + exp(np.float32(-x))))


class Kernel:
    """A numba loop over independent parts: rows, chunks, jobs.

    The function takes `start, stop` before its own arguments and processes the parts start .. stop - 1. Call
    the kernel with the number of elements it processes, the number of parts, then those arguments. If there
    are few elements, or torch.get_num_threads() is 1, the calling thread processes all parts. Otherwise each
    thread processes a run of consecutive parts.

    numba's `prange` would do the same, but compiles a loop three times (docs/why/decisions.md, 77).
    """

    def __init__(self, function: Loop):
        self.loop = serial(function)

    def __call__(self, elements: int, parts: int, *arguments: Any) -> None:
        threads = 1 if elements < SERIAL else min(torch.get_num_threads(), parts)
        if threads <= 1:
            self.loop(0, parts, *arguments)
        else:
            in_runs(parts, threads, lambda start, stop: self.loop(start, stop, *arguments))


def inner(function: Loop) -> Loop:
    """A loop that only other loops call.

    It gets no wrapper that takes arguments from Python: less to compile.
    """
    return njit(**LINKED)(function)


def serial(function: Loop, options: dict[str, Any] = OPTIONS) -> Loop:
    """A numba loop that runs in the calling thread: njit with options, cached on disk.

    If neither the source folder nor the user's cache is writable, it warns and compiles again in each
    process.
    """
    try:
        compiled = njit(cache=True, **options)(function)
        file = compiled._cache._cache_file
        # numba compares this with the start of its cached file and compiles again if they differ, before it
        # unpickles the rest: types renamed since then could not be unpickled
        file._version = f"{file._version} {sources(ROOM)}"
        return compiled
    except RuntimeError as error:  # numba: "cannot cache function: no locator available"
        log.warning(
            "numba kernels are compiled again in each process (%s); set NUMBA_CACHE_DIR to a writable folder",
            error,
        )
        return njit(**options)(function)


def array(tensor: Tensor) -> np.ndarray:
    """The memory of a CPU tensor as a numpy array, bf16 as uint16. Shares memory."""
    # detach costs as much as everything else here, and decoding calls this hundreds of times per token
    if tensor.requires_grad:
        tensor = tensor.detach()
    if _lent:
        return np.from_dlpack(tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor)
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


_lent = False


def lend_memory() -> None:
    """From here on `array` keeps a tensor's storage resizable, which FSDP2 needs to free gathered weights.

    Tensor.numpy makes it non-resizable for good. DLPack does not, and takes 3 µs instead of 1.
    """
    global _lent
    _lent = True


def flat_rows(tensor: Tensor) -> tuple[np.ndarray, int]:
    """A CPU tensor [rows, D] with last stride 1 as (flat memory, stride of a row).

    The memory is shared, from the tensor's first to its last element.
    """
    if tensor.is_contiguous():
        return array(tensor.view(-1)), tensor.shape[1]
    rows, width = tensor.shape
    extent = (rows - 1) * tensor.stride(0) + width if rows and width else 0
    return array(tensor.as_strided((extent,), (1,))), tensor.stride(0)


def widen(x):  # pragma: no cover - body below
    """A kernel element as float32: uint16 is read as the bits of a bf16, float32 is unchanged."""
    raise NotImplementedError("only inside numba kernels")


def narrow(x, like):  # pragma: no cover - body below
    """float32 -> element of the type of `like`.

    bf16 bits rounded to nearest even (NaN stays NaN), or float32 itself.
    """
    raise NotImplementedError("only inside numba kernels")


def convert(x, like):  # pragma: no cover - body below
    """A kernel element as the type of `like`: bf16 bits and float32 either way, or unchanged."""
    raise NotImplementedError("only inside numba kernels")


@overload(convert, inline="always")
def _convert(x, like):
    if x == like:
        return lambda x, like: x
    if x == types.uint16:
        return lambda x, like: widen(x)
    return lambda x, like: narrow(x, like)


@overload(widen, inline="always")
def _widen(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: np.float32(x)


@overload(narrow, inline="always")
def _narrow(x, like):
    if like == types.uint16:

        def rounded(x, like):
            bits = np.float32(x).view(np.uint32)
            odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
            return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

        return rounded
    return lambda x, like: np.float32(x)
