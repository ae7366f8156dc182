"""Definition of an op: one reference, named candidates, the shapes it is measured at, and its tolerance.

The folder of an op (kernels/<op>/__init__.py) has one `OP: Op` and one public function. That function gets
the implementation from choose() and calls it. Reference and candidates share its signature; a differentiable
op is differentiable in each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Implementation = Callable[..., Any]
Config = Mapping[str, int]
"""Launch parameters by name: sizes of blocks, num_warps, num_stages."""
Arguments = tuple[object, ...]
"""Arguments of one call of an implementation."""


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a GPU's CUDA compute capability.

    Of AMD's GPUs that of the NVIDIA generation whose fast paths torch has for them: (9, 0) for gfx942 and
    gfx950, else (8, 0).
    """
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return (9, 0) if name.startswith(("gfx942", "gfx950")) else (8, 0)
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True)
class Candidate:
    """One way to compute an op.

    load     -> the implementation. Imports what it needs only then. Called once.
    refuses  (device type, dtype) -> the reason why it cannot run there ("triton is not installed", "float64:
             it computes in float32"); "" if it can.
    named_on device types where it is measured like any other, but runs only if `impl` names it.
    predicted_on  device types where it runs without a record, once checked there (choice/predicted.py);
             `because` gives the reason: how much less memory traffic it has. In `predicted_buckets`, () all.
             Any record of the op, dtype and bucket overrides the prediction.
    computes the buckets it can compute; () is all.
    cards    compute capability of a GPU -> True if it is predicted there; None: on all.
    configs  bucket -> launch parameters to measure beside its own (choice/configs.py).
    waits_on device types on which it was never measured: "GPU: not measured". The first committed records
             of one decide: it stays by its rows (1.2 times the reference or more), or is removed.
    """

    load: Callable[[], Implementation]
    refuses: Callable[[str, torch.dtype], str]
    named_on: tuple[str, ...] = ()
    predicted_on: tuple[str, ...] = ()
    because: str = ""
    predicted_buckets: tuple[str, ...] = ()
    computes: tuple[str, ...] = ()
    cards: Callable[[tuple[int, int]], bool] | None = None
    configs: Mapping[str, tuple[Config, ...]] = field(default_factory=dict[str, "tuple[Config, ...]"])
    waits_on: tuple[str, ...] = ()

    def can(self, device: str, dtype: torch.dtype, bucket: str) -> bool:
        """True if it computes that bucket, and can run there."""
        return bucket in (self.computes or (bucket,)) and not self.refuses(device, dtype)

    def predicted(self, device: str, bucket: str) -> bool:
        """True if it runs there without a record, on some cards (`suits`)."""
        return device in self.predicted_on and bucket in (self.predicted_buckets or (bucket,))

    def suits(self, device: torch.device) -> bool:
        """True if it is predicted on this very card."""
        return self.cards is None or device.type != "cuda" or self.cards(capability(device))


@dataclass(frozen=True)
class Case:
    """Inputs that represent a bucket of shapes.

    bucket  the bucket that the op's public function passes to choose() for these inputs.
    inputs  (device, dtype, generator on the host) -> the arguments: random, never zeros; tensors to be
            differentiated require grad.
    dtypes  in which it is measured.
    function  implementation -> the function of it that other packages call (swiglu's backward_weighted), if
            not the implementation itself; None for an implementation that has no such function and so is
            never called by it. `name` says which.
    """

    bucket: str
    inputs: Callable[[torch.device, torch.dtype, torch.Generator], Arguments]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    function: Callable[[Any], Implementation | None] = lambda implementation: implementation
    name: str = ""


@dataclass(frozen=True)
class Op:
    """An op with its reference, its candidates, and how exact a candidate must be.

    tolerance  largest |candidate - exact| / |exact| (Frobenius norms) of any output or input gradient, per
               dtype; exact is the reference in float64 on the same inputs, or in the dtype itself if the op
               is defined by its rounding (`exact_dtype` None).
    differentiable  False for an op that returns nothing: it works in place and is judged by its arguments
               afterwards.
    preferred  a candidate that runs wherever it doesn't refuse and was not timed as slower, whatever the
               records say, `because` it keeps a promise beyond speed (expert_mlp's "fused": nothing expanded
               is saved for backward). "" for every op whose candidates differ in speed only.
    instead    a candidate that keeps that promise too, slower: it runs where `preferred` refuses.
    against    the implementation that its candidates are timed against at a machine's first start (timed.py);
               None: the reference.
    uses       cases of functions beside the one that autograd sees: a candidate must be exact in these too.
               They are checked, not timed.
    """

    name: str
    reference: Implementation
    candidates: Mapping[str, Candidate]
    cases: tuple[Case, ...]
    tolerance: Mapping[torch.dtype, float]
    differentiable: bool = True
    exact_dtype: torch.dtype | None = torch.float64
    preferred: str = ""
    instead: str = ""
    because: str = ""
    against: Implementation | None = None
    uses: tuple[Case, ...] = ()
