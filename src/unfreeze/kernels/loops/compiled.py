"""torch.compile as a candidate of any op written in plain torch: one graph for all shapes.

Where no compiler is at hand, it says why.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys

import torch

from unfreeze.kernels.choice.op import Candidate, Implementation


def candidate(function: Implementation) -> Candidate:
    """`function`, differentiated by autograd, compiled at its first call.

    On CPU it runs only where it is named: with a cold cache compiling an op forward and backward takes longer
    than a run of some hundred steps gains by it, and a chat or a test would pay it too.
    """
    return Candidate(load=lambda: torch.compile(function, dynamic=True), refuses=refuses, named_on=("cpu",))


@functools.cache
def refuses(device: str, dtype: torch.dtype) -> str:
    """Why torch.compile cannot build a kernel there; "" where it can."""
    if device == "cpu":
        # what inductor takes
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
