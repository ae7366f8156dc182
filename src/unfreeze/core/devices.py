"""The devices a computation runs on, by name; nothing here imports torch."""

from __future__ import annotations

import re

OTHERS = {
    "mps": "a Mac's GPU is not built, its CPU is",
    "xpu": "Intel's GPUs are not built, a CPU is",
    "hpu": "Intel's Gaudi is not built, a CPU is",
    "npu": "NPUs are not built, a CPU is",
    "xla": "TPUs are not built, a CPU is",
}
"""Devices that torch knows by name, and on which nothing here was made to run."""


def not_built(name: str) -> str:
    """Why that device is not taken; "" for auto, cpu, cuda and cuda:N, which may still be absent here."""
    if why := OTHERS.get(name.partition(":")[0].strip().lower()):
        return f"{why}; give cpu"
    return "" if re.fullmatch(r"auto|cpu(:0)?|cuda(:\d+)?", name) else "should be auto, cpu, cuda or cuda:N"
