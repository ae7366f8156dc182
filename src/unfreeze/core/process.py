"""What a process on a CPU takes beside all that is counted."""

from __future__ import annotations

import ctypes
import gc
import time

from unfreeze.core.units import format_bytes

COMPILED = int(0.8 * 2**30)
"""Bytes at most: code that numba and oneDNN compile, their caches, the allocator's slack.

Measured as peak - plan - process at planning (tiny-k2, Zen 4): 0.3 GiB in float32 on one core, 0.5 in
bfloat16 on one, 0.8 in bfloat16 on two; it grows with the number of GEMM shapes. The least is none: with all
loops compiled before, `unfreeze demo` takes 44 MiB.
"""

PROCESS = int(0.5 * 2**30)
"""Bytes of the interpreter and the libraries of a run, torch among them: 0.45 GiB when it plans."""

COMPILED_AT_MOST = f"{COMPILED / 2**30:.1f} GiB"
BESIDE = f"up to {COMPILED_AT_MOST} of compiled code"
"""As it stands beside a planned number."""


_begun: list[float] = []


def command_begins() -> None:
    """Note when: imports and the reading of rows are part of the time of a run."""
    _begun[:] = [time.time()]


def take_begun() -> float | None:
    """When the command began, in seconds since 1970-01-01 UTC, told once: of several runs to the first."""
    return _begun.pop() if _begun else None


def planned_words(planned: float, kind: str) -> str:
    """'367.5 MiB to 1.2 GiB': bytes of a plan without and with compiled code, on a device of that kind."""
    low = format_bytes(planned)
    return f"{low} to {format_bytes(planned + COMPILED)}" if kind == "cpu" else low


def room_words(planned: float, room: float, kind: str) -> str:
    """'391.5 MiB', the memory that is there; with a warning where compiling may need more than that."""
    short = kind == "cpu" and planned <= room < planned + COMPILED
    return format_bytes(room) + " (compiling may need more than there is)" * short


def trim() -> None:
    """Free what is garbage, and give freed heap back to the system, where the C library can."""
    gc.collect()
    give = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give is not None:
        give(0)


def give_back_freed() -> None:
    """Let glibc return every block of 1 MiB or more to the system as soon as it is freed.

    Its heap would keep blocks of up to 32 MiB each, in an arena for every thread. With half of 69 M weights
    in float32 a process took 1.2 GB so, and takes 0.7. Streaming 12 GB of experts took 3.4 GB, and takes 2.9.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; other systems have none
    if mallopt is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
        mallopt(-8, 2)  # M_ARENA_MAX
