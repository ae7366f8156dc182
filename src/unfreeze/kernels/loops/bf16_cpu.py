"""What this CPU multiplies bf16 with."""

from __future__ import annotations

import functools
import os

import torch
from llvmlite import binding


@functools.cache
def available() -> bool:
    """Whether numba can be given vdpbf16ps (AVX512-bf16), the instruction of bf16_tile.py.

    Where NUMBA_CPU_NAME or NUMBA_CPU_FEATURES say what numba compiles for, it is not assumed.
    """
    named = os.environ.get("NUMBA_CPU_NAME") or os.environ.get("NUMBA_CPU_FEATURES")
    return not named and bool(binding.get_host_cpu_features().get("avx512bf16", False))


@functools.cache
def panels_pay() -> bool:
    """Whether that is the fastest instruction this CPU has.

    With AMX one instruction multiplies sixteen rows, and oneDNN's GEMMs use it.
    """
    return available() and not torch.cpu.get_capabilities().get("amx_bf16", False)
