"""The first run on a machine compiles its CPU loops, some 20 seconds of one core in bf16.

A second process compiles those of backward and of the optimizer while the run reads the model and answers the
samples. Step 1 of tiny-k2 then comes after 16.4 s instead of 26.5 (decision 77).

Both keep what they compile in numba's cache on disk, where the next run finds it. A stamp beside the cache
says that all of it is there; it is named after the loops' source, so that edited loops are compiled anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding as llvm

from unfreeze.kernels import expert_mlp
from unfreeze.kernels.choice import ops
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.measure import arguments, visit
from unfreeze.kernels.expert_mlp.backend import Backend
from unfreeze.kernels.loops.numba_options import cache_folder, loop_sources

# After the experts' backward, which takes longest: each op and which of its cases. The smallest, but
# "few" rows of rms_norm have no loop.
TRAINED = {"linear_cross_entropy": 0, "adamw": 0, "swiglu": 0, "rms_norm": -1, "rotary": 0}


def compile_loops(dtype: torch.dtype) -> None:
    """The loops of backward and of the optimizer, each op at one of its measured cases.

    The longest is the experts' backward. The run compiles their forward meanwhile, for its samples.
    """
    device = torch.device("cpu")
    of_experts: Any = arguments(expert_mlp.OP.cases[0], device, dtype)
    x, ids, weights, gate_up, down, factors = of_experts
    backend: Any = _OnlyBackward(expert_mlp.backend_for(x, gate_up, down))
    expert_mlp.fused_expert_mlp(x, ids, weights, gate_up, down, factors, backend).sum().backward()
    for name, number in TRAINED.items():
        op = ops.load(name)
        case = op.cases[number]
        kind = dtype if dtype in case.dtypes else case.dtypes[0]
        visit(op, choose(op, device, kind, case.bucket), arguments(case, device, kind))


class _OnlyBackward:
    """A backend whose forward writes nothing."""

    def __init__(self, backend: Backend[Any]):
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def forward_group(self, *_: object) -> None: ...


@contextmanager
def compiling(device: torch.device, dtype: str) -> Iterator[subprocess.Popen[bytes] | None]:
    """While the body runs, a second process compiles the loops; it ends with the body.

    None where there is nothing to compile (a GPU, one thread, or all of it done before), and in all processes
    of a host but the first.

    dtype: a name of torch's, "bfloat16" or "float32".
    """
    stamp = _stamp(dtype)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not first or device.type != "cpu" or torch.get_num_threads() < 2 or stamp is None or stamp.exists():
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
    name = f"compiled-{dtype}-{llvm.get_host_cpu_name()}-{loop_sources()[:16]}"  # numba's are of one CPU too
    return None if folder is None else folder / name


if __name__ == "__main__":
    compile_loops(getattr(torch, sys.argv[1]))
    if (made := _stamp(sys.argv[1])) is not None:
        made.touch()
