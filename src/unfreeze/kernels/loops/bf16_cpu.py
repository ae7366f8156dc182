"""What this CPU multiplies bf16 with."""

from __future__ import annotations

from unfreeze.core import cpu


def available() -> bool:
    """Whether numba can be given vdpbf16ps (AVX512-bf16), the instruction of bf16_tile.py."""
    return cpu.loops_have("cpu-avx512-bf16")


def panels_pay() -> bool:
    """Whether that is the fastest instruction this CPU has.

    With AMX one instruction multiplies sixteen rows, and oneDNN's GEMMs use it.
    """
    return available() and not cpu.has("cpu-amx")
