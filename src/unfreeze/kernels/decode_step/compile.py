"""Compiles the operations of a step in two processes: LLVM takes one core while another one is idle.

    python -m unfreeze.kernels.decode_step.compile float32 unfreeze.kernels.decode_step.ops:attend …

The first answer on a machine waits for these loops. Both processes keep them in numba's cache on disk, where
each finds what the other has finished. This one begins with the first operation and the second one with the
last, until they meet.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from unfreeze.kernels.choice.ahead import beside
from unfreeze.kernels.decode_step.pointer import Callee

MODULE = "unfreeze.kernels.decode_step.compile"
DTYPES = {True: "bfloat16", False: "float32"}
WORTH = 3  # loops that are left: the second process takes 2 s to import what it needs


def compile_all(callees: Sequence[Callee], pairs: bool) -> None:
    """Compile each loop or read it from the cache. pairs: the step multiplies in bf16.

    A second process helps if a loop is not in the cache, and if torch may take a second core.
    """
    left = list(dict.fromkeys(callees))
    with ExitStack() as second:
        alone = torch.get_num_threads() < 2
        while left:
            callee = left.pop(0)
            callee.address(pairs)
            if not alone and callee.compiled and len(left) >= WORTH:
                names = [name for each in reversed(left) if (name := each.name)]
                second.enter_context(beside(MODULE, DTYPES[pairs], *names))
                alone = True


def main(dtype: str, *names: str) -> None:
    """Compile the loops of these names, in their order."""
    for name in names:
        module, _, attribute = name.partition(":")
        getattr(importlib.import_module(module), attribute).address(dtype == DTYPES[True])


if __name__ == "__main__":
    main(*sys.argv[1:])
