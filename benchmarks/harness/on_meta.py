"""A step as CUDA would run it, on torch's meta device: nothing is computed, and each launch can be counted.

    as_on_an_h200   kernels are chosen as on an H200 that nobody measured; Triton's launch nothing
    Launches        counts launches, and the bytes of their operands, by group of ops

A launch is one torch operation that is no view, or one call of a Triton kernel. Its bytes are those of its
tensor arguments and of its result: each operand is read or written once. That is a lower bound for a kernel
that reads an operand several times, and an upper bound for one that reads a part of it. A gather reads as
many numbers as it writes.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unfreeze
from unfreeze.kernels.choice import choose as choosing
from unfreeze.kernels.choice import op as declared
from unfreeze.kernels.choice import predicted, record

PACKAGE = Path(unfreeze.__file__).parent
Report = Callable[..., None]
"""(name of a kernel, its arguments, its group: by the line that runs it)."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "addmv", "mv"}
UNLAUNCHED = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "lift_fresh",
    "detach",
    "_unsafe_view",
}
GATHERS = {"embedding", "index_select", "gather"}  # they read as many numbers as they write
GROUPS: tuple[tuple[str, str], ...] = (
    ("kernels/expand", "expansion"),
    ("kernels/int4_grouped_mm", "experts"),
    ("kernels/grouped_mm", "experts"),
    ("kernels/attention", "attention"),
    ("kernels/packed_attention", "attention"),
    ("kernels/swiglu", "activation"),
    ("models/blocks/mlp", "activation"),
    ("kernels/rms_norm", "norms"),
    ("models/blocks/norm", "norms"),
    ("kernels/rotary", "rotary"),
    ("models/blocks/rope", "rotary"),
    ("kernels/linear_cross_entropy", "head"),
    ("kernels/adamw", "optimizer"),
    ("train/optim", "optimizer"),
    ("adapters", "adapters"),
    ("models/blocks/routers", "router"),
    ("models/blocks/moe", "router"),
    ("parallel/placement/dispatch", "exchange"),
)
"""Folder or file of the innermost line of this package that runs an op -> its group."""
OF_EXPERTS = {"kernels/swiglu", "kernels/token_permute", "kernels/expert_mlp"}


@contextmanager
def as_on_an_h200(report: Report = lambda name, arguments: None) -> Iterator[None]:
    """Kernels are chosen for tensors on meta as on an H200 that nobody measured; Triton's call `report`."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(
        kernel: Any, *arguments: object, grid: object = None, warmup: object = None, **named: object
    ) -> None:
        report(kernel.fn.__name__, [*arguments, *named.values()])

    real = choosing._choose

    def on_cuda(op: Any, device: torch.device, dtype: torch.dtype, bucket: str, impl: str) -> Any:
        return real(op, torch.device("cuda", 0) if device.type == "meta" else device, dtype, bucket, impl)

    with ExitStack() as patches:
        patches.enter_context(patch.dict("os.environ", {"TRITON_INTERPRET": "0"}))
        for kernel in (JITFunction, InterpretedFunction):
            patches.enter_context(patch.object(kernel, "run", run))
        for module, name, value in (
            (torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200"),
            (predicted, "wrong", lambda *_: ""),
            (choosing, "_CHOSEN", {}),
            (choosing, "_WRONG", {}),
            (choosing, "device_key", lambda device: "nvidia-h200"),
            (record, "device_key", lambda device: "nvidia-h200"),
            (declared, "capability", lambda device: (9, 0)),
            (choosing, "record_rows", lambda *_: []),
            (choosing, "_choose", on_cuda),
        ):
            patches.enter_context(patch.object(module, name, value))
        yield


class Launches(TorchDispatchMode):
    """Counts of launches and bytes by group, of ops on meta while the mode is open.

    rank: width of the adapters' thin side, by which products in autograd's own backward are told apart.
    """

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def report(self, name: str, arguments: Iterable[object], group: str | None = None) -> None:
        """Count one launch of a kernel that torch does not know."""
        # a kernel gets some tensor again for an argument that it does not read
        tensors = {
            id(leaf): leaf for leaf in tree_leaves(list(arguments)) if isinstance(leaf, Tensor)
        }.values()
        self._add(group or self._group(name, tensors, sys._getframe(1)), tensors)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or name in UNLAUNCHED:
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            self._add(
                self._group(name, tensors, sys._getframe(1)), list({id(x): x for x in tensors}.values())
            )
        return out

    def _add(self, group: str, tensors: Iterable[Tensor]) -> None:
        self.launches[group] += 1
        self.bytes[group] += sum(tensor.nbytes for tensor in tensors if tensor.is_meta)

    def _group(self, name: str, tensors: Iterable[Tensor], frame: FrameType | None) -> str:
        """The group of an op, by the innermost line of this package that runs it."""
        places = list(_places(frame))
        inner = places[0] if places else ("", "")
        if inner == ("kernels/expert_mlp/workspace", "_fill"):
            return "copies of dense experts"
        if inner[0].startswith("kernels/expert_mlp/workspace") and name == "copy_":
            return "adapters"
        experts = any(place.startswith("kernels/expert_mlp") for place, _ in places)
        if experts and any(inner[0].startswith(part) for part in OF_EXPERTS):
            return "experts" if name in PRODUCTS else "rows of experts"
        group = next((group for start, group in GROUPS if inner[0].startswith(start)), "")
        if group:
            return group
        thin = any(self.rank in tensor.shape for tensor in tensors if tensor.dim() == 2)
        if thin:
            return "adapters"
        return "dense layers" if name in PRODUCTS else "elementwise"


def _places(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """(file in the package without its suffix, function) of each frame, outwards to autograd's engine."""
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        place = _place(frame.f_code.co_filename)
        if place:
            yield place, frame.f_code.co_name
        frame = frame.f_back


@functools.cache
def _place(file: str) -> str:
    path = Path(file)
    return path.relative_to(PACKAGE).with_suffix("").as_posix() if path.is_relative_to(PACKAGE) else ""


class Flash(torch.autograd.Function):
    """A flash kernel: one launch a direction, of q, k, v, o, and their gradients. report: Launches.report."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, report: Report) -> Tensor:
        o = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = torch.empty(q.shape[:3], device=q.device)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.report = report
        report("flash", [q, k, v, o, lse], "attention")
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ctx.report("flash", [q, k, v, o, lse, *gradients, dq, dk, dv], "attention")
        return dq, dk, dv, None
