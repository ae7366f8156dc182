"""The first run on a machine compiles its CPU loops, some 15 seconds of one core.

A second process compiles those of the training step while the first reads the model and answers the samples.

Both keep what they compile in numba's cache on disk, where the next run finds it. A stamp beside the cache
says that all of it is there; it is named after the loops' source, so that edited loops are compiled anew.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from unfreeze.kernels.choice import ops
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.measure import arguments, visit
from unfreeze.kernels.loops.numba_options import cache_folder, loop_sources

# In the order of their compilation time; a sample needs none of the first three.
TRAINED = ("adamw", "linear_cross_entropy", "expert_mlp", "swiglu", "rotary", "rms_norm", "int4_expand")


def compile_loops(dtype: torch.dtype) -> None:
    """Each op of a training step once, forward and backward, at the smallest of its measured cases."""
    device = torch.device("cpu")
    for name in TRAINED:
        op = ops.load(name)
        case = op.cases[0]
        visit(op, choose(op, device, dtype, case.bucket), arguments(case, device, dtype))


@contextmanager
def compiling(device: torch.device, dtype: str) -> Iterator[subprocess.Popen[bytes] | None]:
    """While the body runs, a second process compiles the loops; it ends with the body.

    None where there is nothing to compile (a GPU, one thread, or all of it done before).

    dtype: a name of torch's, "bfloat16" or "float32".
    """
    stamp = _stamp(dtype)
    if device.type != "cpu" or torch.get_num_threads() < 2 or stamp is None or stamp.exists():
        yield None
        return
    command = [sys.executable, "-m", __name__, dtype]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _stamp(dtype: str) -> Path | None:
    """The file that says "all compiled"; None where numba has no folder to keep anything in."""
    folder = cache_folder()
    return None if folder is None else folder / f"compiled-{dtype}-{loop_sources()[:16]}"


if __name__ == "__main__":
    compile_loops(getattr(torch, sys.argv[1]))
    if (made := _stamp(sys.argv[1])) is not None:
        made.touch()
