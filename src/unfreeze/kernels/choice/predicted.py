"""Predicted candidates: those expected to be faster, each checked on this device before its first use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace

import torch
from torch import Tensor

from unfreeze.kernels.choice import ops
from unfreeze.kernels.choice.choose import by_record, implementation_of
from unfreeze.kernels.choice.measure import Truth, arguments, forget, relative_error, visit, without_gradients
from unfreeze.kernels.choice.op import Arguments, Case, Implementation, Op
from unfreeze.quant.codec import Packed


def expected(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The ops that run a predicted candidate there, if it passes its check, in a model of that dtype.

    An op that is not computed in that dtype (adamw: float32) counts in its own.
    """
    names = []
    for op in map(ops.import_op, ops.OPS):
        for case in op.cases:
            kind = dtype if dtype in case.dtypes else case.dtypes[0]
            # skip the records of an op without a prediction there
            predicted = any(part.predicted(device.type, case.bucket) for part in op.candidates.values())
            if predicted and _origin(op, device, kind, case.bucket) == "predicted, not measured":
                names.append(op.name)
                break
    return names


def _origin(op: Op, device: torch.device, dtype: torch.dtype, bucket: str) -> str:
    return by_record(op, device, dtype, bucket, check=False).origin


def wrong(op: Op, name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The reason why that candidate may not run; "" if it is right.

    It fails if it raises, or is not exact within the op's own tolerance: as autograd sees it, and in each
    function that others call (`Op.uses`). The check uses the smallest case that it is predicted for, with CPU
    sizes; the exact result is computed on the CPU. Compiling it takes about a second.
    """
    candidate = op.candidates.get(name)
    wanted = (candidate.predicted_buckets or candidate.computes) if candidate else ()
    cases = (case for case in op.cases if not wanted or case.bucket in wanted)
    case = next((case for case in cases if dtype in case.dtypes), None)
    if case is None or dtype not in op.tolerance:
        return f"no case in {dtype} to check it with"

    def load() -> Implementation:
        return implementation_of(op, name, device, dtype)

    uses = [use for use in op.uses if dtype in use.dtypes and (not wanted or use.bucket in wanted)]
    for part in (case, *uses):
        if reason := fault(op, part, load, device, dtype, op.tolerance[dtype]):
            return f"{part.name}: {reason}" if part.name else reason
    return ""


def fault(
    op: Op,
    case: Case,
    load: Callable[[], Implementation],
    device: torch.device,
    dtype: torch.dtype,
    limit: float,
) -> str:
    """The fault of the implementation that `load` returns: it raises, or an error is above `limit`.

    "" if there is none. The exact result is computed on the CPU. The first caller may be in inference mode,
    under no_grad or in a Function's forward.
    """

    def worst() -> float:
        function = case.function(load())
        return 0.0 if function is None else _error(op, case, function, device, dtype)

    return _fault(worst, limit)


def fault_on_device(
    op: Op,
    case: Case,
    load: Callable[[], Implementation],
    device: torch.device,
    dtype: torch.dtype,
    limit: float,
) -> str:
    """As `fault`, for shapes that would take seconds on a CPU.

    The reference computes the exact result on the device, in the op's `exact_dtype` (float64), from inputs
    that are drawn there. Dtypes of outputs and gradients are checked too.
    """

    try:
        return fault_against(lambda: Truth(op, case, device, dtype), load, limit)
    finally:
        forget()


def fault_against(truth: Callable[[], Truth], load: Callable[[], Implementation], limit: float) -> str:
    """As `fault`, of an implementation beside results that are known."""

    def worst() -> float:
        errors = truth().errors(load())
        return max(errors.forward, errors.backward)

    return _fault(worst, limit)


def _fault(worst_error: Callable[[], float], limit: float) -> str:
    try:
        # its graph is its own: a checkpoint that the first call is in would count what this saves
        with torch.inference_mode(False), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _same):
            worst = worst_error()
    # any failure disqualifies it
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "" if worst <= limit else f"error {worst:.1e}, tolerance {limit:.1e}"


def _same(saved: Tensor) -> Tensor:
    return saved


def _error(
    op: Op, case: Case, implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> float:
    """The largest relative error of an output or a gradient."""
    cpu = torch.device("cpu")
    want = Truth(op, case, cpu, dtype).exact

    def moved() -> Arguments:
        return tuple(_on(arg, device) for arg in arguments(case, cpu, dtype))

    got = visit(op, implementation, moved())
    plain = without_gradients(op, implementation, moved())
    pairs = [*zip(got, want, strict=True), *([(plain, want[0])] if plain else [])]
    errors = [
        relative_error(ours.detach().cpu(), exact.detach())
        for mine, theirs in pairs
        for ours, exact in zip(mine, theirs, strict=True)
    ]
    return max(errors, default=0.0)


@functools.singledispatch
def _on(value: object, device: torch.device) -> object:
    """`value` with every tensor moved to `device`; leaves stay leaves."""
    if isinstance(value, Packed):
        return Packed(value.codec, {name: part.to(device) for name, part in value.parts.items()})
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _on(getattr(value, f.name), device) for f in fields(value) if f.init}
        return replace(value, **parts)
    if isinstance(value, (list, tuple)):
        return type(value)(_on(item, device) for item in value)
    return {key: _on(item, device) for key, item in value.items()} if isinstance(value, Mapping) else value


@_on.register
def _(value: Tensor, device: torch.device) -> Tensor:
    return value.detach().to(device).requires_grad_(value.requires_grad)
