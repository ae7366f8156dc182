"""The bf16 instructions of this CPU."""

from __future__ import annotations

from unfreeze.core import cpu


def available() -> bool:
    """True if numba can compile vdpbf16ps (AVX512-bf16), the instruction of bf16_tile.py."""
    return cpu.loops_have("cpu-avx512-bf16")


def panels_pay() -> bool:
    """True if that is the fastest instruction of this CPU.

    With AMX one instruction multiplies sixteen rows, and oneDNN's GEMMs use it.
    """
    return available() and not cpu.has("cpu-amx")
