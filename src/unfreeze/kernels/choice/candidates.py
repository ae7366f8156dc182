"""Candidates implemented in one module each, imported only when requested.

numba_cpu, triton_cuda.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from unfreeze.kernels.choice.op import Candidate, Implementation
from unfreeze.kernels.loops import triton_options


def of_modules(
    folder: str, implementation: Callable[[Any], Implementation], because: str
) -> dict[str, Candidate]:
    """The candidates of the op in package `folder`.

    implementation(module) returns the op as autograd sees it, built on the module's functions. The module is
    looked up by name, so its type is not known here. because: of its Triton candidate
    (triton_options.candidate).
    """

    def load(name: str) -> Callable[[], Implementation]:
        return lambda: implementation(importlib.import_module(f"{folder}.{name}"))

    return {
        "numba": numba(load("numba_cpu")),
        "triton": triton_options.candidate(load("triton_cuda"), because),
    }


def numba(
    load: Callable[[], Implementation], buckets: tuple[str, ...] = (), computes: tuple[str, ...] = ()
) -> Candidate:
    """A candidate of numba loops that replace several passes of plain torch over memory.

    It can compute `computes`, and runs for `buckets` on a CPU if nothing was timed or measured; () means all.
    """
    because = "one pass over memory, plain torch takes several"
    return Candidate(load, numba_refuses, (), ("cpu",), because, buckets, computes)


def numba_refuses(device: str, dtype: torch.dtype) -> str:
    """The reason why numba loops that read float32 and bf16 cannot run there; "" if they can."""
    if device != "cpu":
        return f"it runs on cpu, not {device}"
    return "" if dtype in (torch.float32, torch.bfloat16) else f"{dtype}: its loops read float32 and bfloat16"
