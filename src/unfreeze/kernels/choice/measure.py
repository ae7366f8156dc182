"""Makes records: an op's candidates are compared with its reference in float64, then timed in turn with it.

A time covers forward and backward, if the op has a backward. CPU: wall clock; with one thread CPU time, which
other processes disturb less. CUDA: events. The L2 cache is overwritten before each sample, so every sample
reads its inputs from memory.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date

import torch
from torch import Tensor

from unfreeze.kernels.choice.choose import REQUIRED_GAIN, implementation_of
from unfreeze.kernels.choice.configs import with_best
from unfreeze.kernels.choice.draw import normal
from unfreeze.kernels.choice.op import Arguments, Case, Implementation, Op
from unfreeze.kernels.choice.record import Row, device_key
from unfreeze.quant.codec import Packed

SAMPLE = 2e-3  # target seconds of a CPU sample: a call of some microseconds is repeated within one
FEWEST, MOST = 9, 101  # samples; odd, so that the median is one of them
CLEAR = 4.0  # stop sampling when the difference is this many times what a record needs (choose.proves)
SHORT_CALL = 0.05  # seconds; a sample of a longer call is one call, not two
L2_BYTES = 256 << 20  # more than any GPU's L2 (an H200 has 50 MB)
LEAD = 4_000_000  # the device waits this many cycles before a sample, 2 ms: time to queue launches
SEED = 0
HOST_DRAWS = 1 << 24  # numbers drawn on the host, in 0.2 s; more are drawn on the device


class Wrong(Exception):
    """A candidate's outputs differ from the reference's in number, shape or dtype."""


@dataclass(frozen=True)
class Errors:
    """Largest |candidate - exact| / |exact| of an output, and of a gradient of an input."""

    forward: float
    backward: float


def arguments(case: Case, device: torch.device, dtype: torch.dtype) -> Arguments:
    """A case's inputs: the same numbers at each call, in new memory: an op may write to its arguments."""
    if _DRAWN is None:
        return case.inputs(device, dtype, torch.Generator().manual_seed(SEED))
    key = id(case), device, dtype
    if key not in _DRAWN:
        _DRAWN[key] = case, case.inputs(device, dtype, torch.Generator().manual_seed(SEED))
    return copy.deepcopy(_DRAWN[key][1])


_DRAWN: dict[tuple[int, torch.device, torch.dtype], tuple[Case, Arguments]] | None = None
"""Inputs that `arguments` has drawn, and their cases, so that no id comes twice; None outside drawn_once."""


@contextmanager
def drawn_once() -> Iterator[None]:
    """Within it `arguments` draws a case's inputs once, and returns copies.

    A check needs them six times and more, and drawing 16 million numbers on the host takes 0.2 s: with draws
    a row of the table took 1.4 s on an H100, most of it on the host.
    """
    global _DRAWN
    before, _DRAWN = _DRAWN, {}
    try:
        yield
    finally:
        _DRAWN = before


def converted(value: object, dtype: torch.dtype) -> object:
    """Convert each floating point tensor in `value` to `dtype`.

    Each is a new leaf, which requires a gradient if the original did. A Packed weight is not converted.
    """
    if isinstance(value, Tensor):
        return (
            value.detach().to(dtype).requires_grad_(value.requires_grad)
            if value.is_floating_point()
            else value
        )
    if isinstance(value, (Packed, type)):
        return value
    if is_dataclass(value):
        parts = {f.name: converted(getattr(value, f.name), dtype) for f in fields(value) if f.init}
        return replace(value, **parts)  # type: ignore[type-var]
    if isinstance(value, (list, tuple)):
        return type(value)(converted(item, dtype) for item in value)
    if isinstance(value, Mapping):
        return {key: converted(item, dtype) for key, item in value.items()}
    return value


def tensors(value: object) -> Iterator[Tensor]:
    """The tensors in `value`, except those of a Packed weight."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, (Packed, type)):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(item)


def visit(op: Op, implementation: Implementation, args: Arguments) -> tuple[list[Tensor], list[Tensor]]:
    """One timed call: (outputs, gradients of the leaves for a random gradient of the outputs).

    For an op that returns nothing, the outputs are the arguments it wrote to.
    """
    wanted = [tensor for tensor in tensors(args) if tensor.requires_grad] if op.differentiable else []
    with torch.set_grad_enabled(bool(wanted)):
        returned = implementation(*args)
    outputs = list(tensors(args if returned is None else returned))
    differentiated = [output for output in outputs if output.requires_grad]
    if not wanted or not differentiated:
        return outputs, []
    grads = torch.autograd.grad(
        differentiated, wanted, [_upstream(output) for output in differentiated], allow_unused=True
    )
    return outputs, [
        torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, wanted, strict=True)
    ]


def without_gradients(op: Op, implementation: Implementation, args: Arguments) -> list[Tensor]:
    """The outputs of a call under no_grad, as in a validation: an implementation may then take another way.

    [] for an op without gradients, whose one way `visit` takes.
    """
    if not op.differentiable:
        return []
    with torch.no_grad():
        return list(tensors(implementation(*args)))


_UPSTREAM: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def _upstream(output: Tensor) -> Tensor:
    """The gradient of the outputs: random, and the same for every implementation.

    It is drawn once per shape, so no timing includes it. Its numbers are exact in bf16, so they are the same
    in every dtype; and up to HOST_DRAWS numbers on every device.
    """
    key = (output.shape, output.dtype, output.device)
    if key not in _UPSTREAM:
        where = output.device if output.numel() > HOST_DRAWS else torch.device("cpu")
        noise = normal(where, torch.Generator().manual_seed(SEED + 1), *output.shape).bfloat16()
        _UPSTREAM[key] = noise.to(device=output.device, dtype=output.dtype)
    return _UPSTREAM[key]


def forget() -> None:
    """Free the gradients that `visit` has drawn."""
    _UPSTREAM.clear()


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64, Frobenius norms.

    For integers, or if `want` is zero: 0 if equal, else inf. NaN counts as inf.
    """
    if got.shape != want.shape:
        raise Wrong(f"shape {list(got.shape)}, wanted {list(want.shape)}")
    if torch.equal(got.to(want.dtype), want):
        return 0.0
    norm = float(want.double().norm())
    error = (
        float((got.double() - want.double()).norm()) / norm if norm and want.is_floating_point() else math.inf
    )
    return error if math.isfinite(error) else math.inf


class Truth:
    """The reference's results for one case.

    exact  in Op.exact_dtype (float64), or in the dtype itself if that is None: errors are measured against it
    kinds  the dtypes of outputs and gradients when computed in the dtype itself
    """

    def __init__(self, op: Op, case: Case, device: torch.device, dtype: torch.dtype):
        self.op, self.case, self.device, self.dtype = op, case, device, dtype
        args = arguments(case, device, dtype)
        if op.exact_dtype is not None:
            args = tuple(converted(arg, op.exact_dtype) for arg in args)
        reference = case.function(op.reference)
        assert reference is not None  # the reference has every function
        # a reference that is itself one of our backends computes in float32 at most
        plain = case.function(op.against or op.reference)
        assert plain is not None
        self.exact = visit(op, plain, args)
        self.kinds = [
            [x.dtype for x in part] for part in visit(op, reference, arguments(case, device, dtype))
        ]

    def errors(self, implementation: Implementation) -> Errors:
        """The errors of an implementation. Raises Wrong if the number, a shape or a dtype differs."""
        function = self.case.function(implementation)
        if function is None:
            return Errors(0.0, 0.0)  # nobody calls it by this function
        case = self.case, self.device, self.dtype
        got = visit(self.op, function, arguments(*case))
        plain = without_gradients(self.op, function, arguments(*case))
        parts = [("outputs", got[0], 0), ("gradients", got[1], 1)]
        parts += [("outputs without gradients", plain, 0)] if plain else []
        largest = []
        for what, ours, of in parts:
            exact, kinds = self.exact[of], self.kinds[of]
            if [x.dtype for x in ours] != kinds:
                raise Wrong(
                    f"{what} in {[str(x.dtype) for x in ours]}, the reference's are in"
                    f" {[str(kind) for kind in kinds]}"
                )
            largest.append(
                max(
                    (relative_error(x.detach(), want.detach()) for x, want in zip(ours, exact, strict=True)),
                    default=0.0,
                )
            )
        return Errors(max([largest[0], *largest[2:]]), largest[1])


def candidates_of(
    op: Op, case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Implementation], dict[str, Errors], dict[str, str]]:
    """Return (the candidates to time, the errors of all, the reasons why the others may not run).

    Each is called here for the first time, so this includes its compilation.
    """
    truth = Truth(op, case, device, dtype)
    good: dict[str, Implementation] = {}
    errors: dict[str, Errors] = {}
    refused: dict[str, str] = {}
    for name, candidate in op.candidates.items():
        if not candidate.can(device.type, dtype, case.bucket):
            continue  # a fact of this machine or of its purpose: it is not recorded
        try:
            own = implementation_of(op, name, device, dtype)
            implementation = with_best(own, op, name, device, dtype, case.bucket)
            errors[name] = truth.errors(implementation)
        # any failure of a candidate disqualifies it, and must not stop the measurement
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        worst, limit = max(errors[name].forward, errors[name].backward), op.tolerance[dtype]
        if worst > limit:
            refused[name] = f"error {worst:.1e}, tolerance {limit:.1e}"
        else:
            good[name] = implementation
    forget()
    return good, errors, refused


def measure(op: Op, case: Case, device: torch.device, dtype: torch.dtype, seconds: float) -> list[Row]:
    """A row per candidate that doesn't refuse here.

    Timing takes about `seconds`, at least FEWEST samples each. Raises what the reference raises.
    """
    # errors first; only those within the tolerance are timed
    gc.collect()
    good, errors, refused = candidates_of(op, case, device, dtype)
    calls = {
        name: call(op, f, case, device, dtype) for name, f in {"reference": op.reference, **good}.items()
    }
    times = in_turn(calls, device, seconds) if good else {}
    forget()

    # the row of a refused candidate has the reason; other rows have errors and times
    common = {
        "op": op.name,
        "device": device_key(device),
        "dtype": str(dtype).removeprefix("torch."),
        "bucket": case.bucket,
    }
    origin = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    rows: list[Row] = [
        {**common, "candidate": name, "refused": reason, **origin} for name, reason in refused.items()
    ]
    for name in good:
        (reference, reference_spread), (ours, spread) = (
            median_and_spread(times[key]) for key in ("reference", name)
        )
        rows.append(
            {
                **common,
                "candidate": name,
                "error_forward": errors[name].forward,
                "error_backward": errors[name].backward,
                "median_us": ours,
                "reference_median_us": reference,
                "spread_us": spread,
                "reference_spread_us": reference_spread,
                "repeats": len(times[name]),
                **origin,
            }
        )
    return rows


def call(
    op: Op, implementation: Implementation, case: Case, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """A call of that implementation on a case's inputs."""
    args = arguments(case, device, dtype)
    return lambda: visit(op, implementation, args)


def in_turn(
    calls: dict[str, Callable[[], object]], device: torch.device, seconds: float
) -> dict[str, list[float]]:
    """Microseconds per call of each, after a warm-up, sampled in turn (A B A B).

    So anything that slows the machine for a while slows all of them. It takes as many rounds as fit into
    `seconds`, from FEWEST to MOST. After FEWEST it stops as soon as every call is clearly faster or slower
    than the first (`clear`).
    """
    clock = _CudaClock(device) if device.type == "cuda" else _CpuClock()
    for call in calls.values():
        call()
    once = {name: clock(call, 1) / 1e6 for name, call in calls.items()}
    once = {name: min(t, clock(calls[name], 1) / 1e6) if t < SHORT_CALL else t for name, t in once.items()}
    per_sample = {
        name: max(1, min(1000, round(SAMPLE / t))) if device.type == "cpu" else 1 for name, t in once.items()
    }
    round_seconds = sum(once[name] * per_sample[name] for name in calls)
    rounds = max(FEWEST, min(MOST, int(seconds / round_seconds))) | 1
    times: dict[str, list[float]] = {name: [] for name in calls}
    with _no_garbage_collection():
        for count in range(1, rounds + 1):
            for name, call in calls.items():
                times[name].append(clock(call, per_sample[name]))
            if count >= FEWEST and count % 2 and clear(times):
                break
    return times


def clear(times: dict[str, list[float]]) -> bool:
    """True if each of the others is clearly faster or slower than the first.

    This must hold in every round, and the medians must differ by CLEAR times the larger of two numbers: 5 %
    of the first's median, and the mean of both spreads.
    """
    first, *others = times.values()
    middle, spread = median_and_spread(first)
    for other in others:
        median, its_spread = median_and_spread(other)
        sides = {a < b for a, b in zip(other, first, strict=True)}
        if len(sides) > 1 or abs(middle - median) < CLEAR * max(
            REQUIRED_GAIN * middle, (spread + its_spread) / 2
        ):
            return False
    return True


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which would count in a sample."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _CpuClock:
    def __init__(self) -> None:
        self.now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def __call__(self, call: Callable[[], object], times: int) -> float:
        """Microseconds per call."""
        begun = self.now()
        for _ in range(times):
            call()
        return (self.now() - begun) / times * 1e6


class _CudaClock:
    def __init__(self, device: torch.device):
        self.device, self.flush = device, torch.empty(L2_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, call: Callable[[], object], times: int) -> float:
        """Microseconds of one call on the device; the host queues its launches while the device waits."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        with torch.cuda.device(self.device):
            torch.cuda._sleep(LEAD)
            begin.record()
            call()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


def median_and_spread(samples: list[float]) -> tuple[float, float]:
    """(median, interquartile range)."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return round(middle, 2), round(high - low, 2)
