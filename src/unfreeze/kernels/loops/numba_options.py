"""How this room compiles numba kernels, how tensors reach them, and bf16 inside them.

numba has no bfloat16: a bf16 tensor travels as the uint16 of its bits, `widen` and `narrow` convert. Kernels
are compiled at their first call for each dtype and kept on disk beside the source, or in the user's cache
where the source folder is read-only.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types
from numba.core.caching import FunctionCache
from numba.extending import overload
from torch import Tensor

log = logging.getLogger(__name__)
ROOM = Path(__file__).parents[1]

Loop = Callable[..., Any]
"""A function as numba compiles it, or compiled: of arrays and numbers, which numba types itself."""

# Loops of fewer elements run on one thread: they take 10 to 100 microseconds. Starting a second thread takes
# 10 on an idle machine; but if another process has the core, OpenMP's spinning barrier waits for a time
# slice, 100 times longer.
SERIAL = 1 << 18


LOG2E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693145751953125)  # 12 bits of ln 2: n * LN2_HIGH is exact
LN2_LOW = np.float32(1.42860677e-06)
ONE = np.float32(1.0)
HALF = np.float32(0.5)
LANES = 16  # sums side by side: a float sum is vectorised only where its order is written down


@numba.njit(inline="always")
def exp(x):
    """exp(x) in float32 for x within -87 .. 88 (clamped), relative error under 2e-7.

    Written here because numba's own calls the C library for each element and is not vectorised.
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


@numba.njit(inline="always")
def sigmoid(x):
    """1 / (1 + exp(-x)), relative error under 3e-7."""
    return np.float32(ONE / np.float32(ONE + exp(np.float32(-x))))


class Kernel:
    """A numba loop in two compilations: for one thread, and (where it is written with prange) for several.

    Called with the number of elements it goes through, then its arguments. One thread where there are few
    elements, and inside a thread that torch has been told to keep to one core.
    """

    def __init__(self, function: Loop):
        self.parallel = _compiled(function, parallel=True)
        # numba's cache on disk does not tell options apart, only names
        alone = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        alone.__qualname__, alone.__module__ = f"{function.__qualname__}_alone", function.__module__
        self.alone = _compiled(alone, parallel=False)

    def __call__(self, elements: int, *arguments: Any) -> Any:
        return (self.alone if set_threads(elements) == 1 else self.parallel)(*arguments)


def serial(function: Loop) -> Loop:
    """A numba loop for one thread only."""
    return _compiled(function, parallel=False)


def _compiled(function: Loop, *, parallel: bool) -> Loop:
    """njit with the options of this room.

    Where neither the source folder nor the user's cache can be written, it says so and compiles anew.
    """
    options: dict[str, Any] = dict(parallel=parallel, nogil=True, boundscheck=False, error_model="numpy")
    try:
        made: Any = numba.njit(cache=True, **options)(function)
        file = made._cache._cache_file
        # what is compared with the file on disk: another stamp compiles anew
        file._source_stamp = (file._source_stamp, sources(ROOM))
        return made
    except RuntimeError as error:  # numba: "cannot cache function: no locator available"
        log.warning(
            "numba kernels are compiled anew in each process (%s); NUMBA_CACHE_DIR names a writable folder",
            error,
        )
        return numba.njit(**options)(function)


@functools.cache
def sources(room: Path) -> str:
    """A hash of all files of kernels/ that mention numba.

    A compiled kernel on disk has inlined code from any of them, but numba itself only compares the time of
    the kernel's own file.
    """
    digest = hashlib.sha256()
    for text in (path.read_bytes() for path in sorted(room.rglob("*.py"))):
        if b"numba" in text:
            digest.update(text)
    return digest.hexdigest()


def loop_sources() -> str:
    """What tells this version of the loops from another: `sources` of kernels/."""
    return sources(ROOM)


def cache_folder() -> Path | None:
    """Where numba keeps this room's compiled loops; None where it has no folder that can be written."""
    try:
        return Path(FunctionCache(set_threads).cache_path)
    except RuntimeError:  # numba: "cannot cache function: no locator available"
        return None


def set_threads(elements: int) -> int:
    """Set and return the threads for a numba loop over so many elements.

    torch's number, or one for a small loop.
    """
    wanted = torch.get_num_threads()
    most = max(1, min(wanted, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    if elements < SERIAL or most == 1:
        return 1
    numba.set_num_threads(most)
    # numba's first launch calls omp_set_num_threads(all cores), which is torch's setting too: OMP_NUM_THREADS
    # and torch.set_num_threads
    # would be overruled from here on
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
    return most


def array(tensor: Tensor) -> np.ndarray:
    """The memory of a CPU tensor as numpy sees it, bf16 as uint16. Shares memory."""
    # detach costs as much as the rest; decoding comes here hundreds of times a token
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


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
    """float32 of a kernel element: uint16 holds the bits of a bf16, float32 is itself."""
    raise NotImplementedError("only inside numba kernels")


def narrow(x, like):  # pragma: no cover - body below
    """float32 -> element of the kind of `like`.

    bf16 bits rounded to nearest even (NaN stays NaN), or float32 itself.
    """
    raise NotImplementedError("only inside numba kernels")


def convert(x, like):  # pragma: no cover - body below
    """A kernel element as one of the kind of `like`: bf16 bits and float32 either way, or as it is."""
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
