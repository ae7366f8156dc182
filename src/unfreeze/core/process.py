"""Memory of a process besides the plan's terms."""

from __future__ import annotations

import ctypes
import gc
import time

from unfreeze.core.units import format_bytes

COMPILED = int(0.8 * 2**30)
"""Upper limit in bytes of code compiled by numba and oneDNN, their caches, and allocator slack.

Measured as peak - plan - process at planning (tiny-k2, Zen 4): 0.3 GiB in float32 on one core, 0.5 in
bfloat16 on one, 0.8 in bfloat16 on two; it grows with the number of GEMM shapes. The lower limit is about 0:
with all loops compiled before, `unfreeze demo` takes 44 MiB.
"""

PROCESS = int(0.5 * 2**30)
"""Bytes of the interpreter and libraries such as torch; measured 0.45 GiB at planning."""

WORKSPACES = int(0.25 * 2**30)
"""Upper limit in bytes of what a GPU holds beside the plan.

Measured on an H100: cuBLAS's workspaces, 66 MiB, and inputs of kernels that are checked at their first use,
up to 242 MiB of a run's first step.
"""

COMPILED_AT_MOST = f"{COMPILED / 2**30:.1f} GiB"
BESIDE = f"up to {COMPILED_AT_MOST} of compiled code"
"""Words beside a planned number."""
BESIDE_ON_GPU = f"up to {format_bytes(WORKSPACES)} of workspaces and checks"


_begun: list[float] = []


def command_begins() -> None:
    """Record the start time, so that a run's time includes imports and reading rows."""
    _begun[:] = [time.time()]


def take_begun() -> float | None:
    """Return the command's start, in seconds since 1970-01-01 UTC, once: only its first run gets it."""
    return _begun.pop() if _begun else None


def planned_words(planned: float, kind: str) -> str:
    """Words such as '367.5 MiB to 1.2 GiB': planned bytes without and with compiled code."""
    low = format_bytes(planned)
    return f"{low} to {format_bytes(planned + COMPILED)}" if kind == "cpu" else low


def room_words(planned: float, room: float, kind: str) -> str:
    """Words such as '391.5 MiB': free memory, with a warning if compiling may need more."""
    short = kind == "cpu" and planned <= room < planned + COMPILED
    return format_bytes(room) + " (compiling may need more)" * short


def trim() -> None:
    """Collect garbage, and return freed heap to the system if the C library can."""
    gc.collect()
    give = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give is not None:
        give(0)


def give_back_freed() -> None:
    """Let glibc return every block of 1 MiB or more to the system as soon as it is freed.

    Otherwise its heap keeps freed blocks of up to 32 MiB, in an arena per thread. This lowered a process with
    half of 69 M weights in float32 from 1.2 to 0.7 GB, and streaming 12 GB of experts from 3.4 to 2.9 GB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
        mallopt(-8, 2)  # M_ARENA_MAX
