"""Check that torch.compile can build a kernel on this machine, and the reason if not (attention's "flex")."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys

import torch


@functools.cache
def refuses(device: str, dtype: torch.dtype) -> str:
    """The reason why torch.compile cannot build a kernel there; "" if it can."""
    if device == "cpu":
        # the compiler that inductor takes
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        return (
            ""
            if shutil.which(compiler)
            else f"torch.compile needs a C++ compiler, and {compiler} is not on the PATH"
        )
    if device == "cuda":
        return (
            "" if importlib.util.find_spec("triton") else "torch.compile needs triton, which is not installed"
        )
    return f"device {device}; torch.compile is tried on cpu and cuda"
