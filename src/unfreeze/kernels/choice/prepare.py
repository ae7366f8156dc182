"""The second process of a first run: it compiles the CPU loops of backward and of the optimizer.

    python -m unfreeze.kernels.choice.prepare bfloat16 auto

What starts it, and why, is in ahead.py.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from unfreeze.kernels import expert_mlp
from unfreeze.kernels.choice import ops
from unfreeze.kernels.choice.choose import implementation_of, running
from unfreeze.kernels.choice.measure import arguments, visit
from unfreeze.kernels.expert_mlp.backend import Backend
from unfreeze.kernels.loops.on_disk import stamp

# Compiled after the experts' backward, which takes longest: each op and the index of its case. It is the
# smallest, but "few" rows of rms_norm have no loop.
TRAINED = {
    "linear_cross_entropy": 0,
    "attention": 0,
    "adamw": 0,
    "few_rows": 0,
    "swiglu": 0,
    "rms_norm": -1,
    "rotary": 0,
    "expand": 0,
}


def compile_loops(dtype: torch.dtype) -> None:
    """Compile the loops of backward and of the optimizer, each op at one of its measured cases.

    The longest is the experts' backward. The run compiles their forward meanwhile, for its samples.
    """
    device = torch.device("cpu")
    of_experts: Any = arguments(expert_mlp.OP.cases[0], device, dtype)
    x, ids, weights, gate_up, down, factors = of_experts
    backend: Any = _OnlyBackward(expert_mlp.backend_for(x, gate_up, down))
    expert_mlp.fused_expert_mlp(x, ids, weights, gate_up, down, factors, backend).sum().backward()
    for name, number in TRAINED.items():
        op = ops.import_op(name)
        case = op.cases[number]
        kind = dtype if dtype in case.dtypes else case.dtypes[0]
        # a first start times all of them, whichever a record prefers
        for candidate in running(op, device, kind, case.bucket):
            visit(op, implementation_of(op, candidate, device, kind), arguments(case, device, kind))


class _OnlyBackward:
    """A backend whose forward writes nothing."""

    def __init__(self, backend: Backend[Any]):
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def forward_group(self, *_: object) -> None: ...


def compile_ahead(dtype: str, device: str) -> None:
    """Run compile_loops and write the stamp, unless the run takes a GPU or one thread.

    A GPU run has nothing to compile; one thread has no core to spare.
    """
    if (device != "cpu" and torch.cuda.is_available()) or torch.get_num_threads() < 2:
        return
    gc.disable()  # a short process needs no garbage collection
    compile_loops(getattr(torch, dtype))
    if (done_stamp := stamp(dtype)) is not None:
        done_stamp.touch()


if __name__ == "__main__":
    compile_ahead(*sys.argv[1:])
