"""Names of devices, without torch."""

from __future__ import annotations

import re

OTHERS = {
    "mps": "GPUs of Macs are not built, CPUs are",
    "xpu": "Intel's GPUs are not built, CPUs are",
    "hpu": "Intel's Gaudi is not built, CPUs are",
    "npu": "NPUs are not built, CPUs are",
    "xla": "TPUs are not built, CPUs are",
}
"""Devices that torch knows and unfreeze does not support."""


def not_built(name: str) -> str:
    """Return why a device is not supported; "" for auto, cpu, cuda and cuda:N (not checked for presence)."""
    if why := OTHERS.get(name.partition(":")[0].strip().lower()):
        return f"{why}; use cpu"
    return "" if re.fullmatch(r"auto|cpu(:0)?|cuda(:\d+)?", name) else "should be auto, cpu, cuda or cuda:N"
