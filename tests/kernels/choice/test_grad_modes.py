"""Every candidate that can run here is entered for the first time in each grad mode that a caller may be in, by the
path that a GPU takes: its check, then the call. Answers before step 1 come under no_grad or inference_mode, and a
recomputed layer in a Function's forward."""

import functools
import importlib
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.kernels.choice.small_cases import small
from unfreeze.kernels.choice import choose as choosing
from unfreeze.kernels.choice import measure, ops, predicted, record
from unfreeze.kernels.expert_mlp import cases, fused_expert_mlp
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.expert_mlp.loop_cuda import LoopCuda

CPU = torch.device("cpu")
expert_mlp = importlib.import_module("unfreeze.kernels.expert_mlp")


class InForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call):
        call()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def under(mode, call):
    with mode():
        call()


def in_forward(call):
    InForward.apply(torch.ones(1, requires_grad=True), call)


def recomputed(reentrant, call):
    """In forward, and again in the thread of backward."""

    def layer(x):
        call()
        return x * 1

    checkpoint(layer, torch.ones(1, requires_grad=True), use_reentrant=reentrant).sum().backward()


MODES = {
    "no_grad": functools.partial(under, torch.no_grad),
    "inference_mode": functools.partial(under, torch.inference_mode),
    "a Function's forward": in_forward,
    "recomputed": functools.partial(recomputed, True),
    "recomputed, not reentrant": functools.partial(recomputed, False),
}


TWO_KINDS = [kind for kind in cases.EVERY_KIND if kind.name in ("packed", "all weights")]
"""Of the experts' self-check in three modes: in all modes it has every kind, and in expert_mlp/test_self_check.py."""

FEW = ("inference_mode", "a Function's forward", "recomputed")
"""Of a candidate that takes a second and more for each: the others nightly, and with all others here."""
SLOW = ("int4_grouped_mm", "token_order")


def runnable():
    """(op, candidate, dtype) of all that this CPU can run, Triton's interpreter included.

    The experts have a test of their own, with a GPU's backends.
    """
    found = []
    for name in sorted(ops.OPS.keys() - {"expert_mlp"}):
        op = ops.import_op(name)
        dtypes = dict.fromkeys(dtype for case in op.cases for dtype in case.dtypes)
        for label, candidate in op.candidates.items():
            able = [dtype for dtype in dtypes if not candidate.refuses("cpu", dtype)]
            found += [(name, label, able[0])] if able else []
    return found


def alone(name, candidate):
    """The op with that candidate only, predicted here as a GPU's are."""
    op = small(name)
    made = replace(
        op.candidates[candidate], named_on=(), predicted_on=("cpu",), because="a stand-in for a GPU"
    )
    return replace(op, candidates={candidate: made}, preferred="", instead="")


def of_a_gpu(name, backend):
    """expert_mlp with the candidate of a GPU, whose self-check runs here."""
    load = lambda: lambda *args: fused_expert_mlp(*args[:6], backend(), *args[6:])  # noqa: E731
    refuses = lambda device, dtype: expert_mlp._self_check.__wrapped__(name, CPU, dtype)  # noqa: E731
    candidate = replace(expert_mlp.OP.candidates[name], load=load, refuses=refuses)
    return replace(expert_mlp.OP, candidates={name: candidate}, preferred=name, instead="")


@pytest.fixture
def first_start(monkeypatch, tmp_path):
    """No record and no choice, as on a card that nobody measured."""
    monkeypatch.setattr(choosing, "CHECKED", ("cpu",))
    for module in (choosing, record):
        monkeypatch.setattr(module, "device_key", lambda device: "nvidia-h200")
    monkeypatch.setattr(record, "COMMITTED", tmp_path)
    monkeypatch.setattr(record, "user_folder", lambda: tmp_path / "user")
    monkeypatch.setattr(choosing, "known", lambda device: {})
    monkeypatch.setattr(choosing, "_loaded", choosing._loaded.__wrapped__)
    record.read.cache_clear()

    def start():
        monkeypatch.setattr(choosing, "_WRONG", {})
        monkeypatch.setattr(choosing, "_TABLE", {})
        choosing.choose_anew()

    yield start
    record.read.cache_clear()


def entered(op, dtype, mode, start):
    """The choice that the first call in that mode makes, and the largest error of its outputs."""
    name = next(iter(op.candidates))
    wanted = op.candidates[name].predicted_buckets
    case = next(c for c in op.cases if dtype in c.dtypes and (not wanted or c.bucket in wanted))
    args = measure.arguments(case, CPU, dtype)
    with torch.no_grad():
        returned = op.reference(*args)
        exact = [x.clone() for x in measure.tensors(args if returned is None else returned)]
    errors = []
    start()

    def call():
        given = measure.arguments(case, CPU, dtype)  # anew: an op may write to them
        out = choosing.choose(op, CPU, dtype, case.bucket)(*given)
        for x, want in zip(measure.tensors(given if out is None else out), exact, strict=True):
            errors.append(measure.relative_error(x.detach(), want))

    mode(call)
    (choice,) = [c for inputs, c in choosing.choices().items() if inputs.op == op.name]
    return choice, max(errors)


def check(op, dtype, mode, start):
    choice, error = entered(op, dtype, mode, start)
    assert choice.runs == next(iter(op.candidates)), choice.why
    assert error <= 2 * op.tolerance[dtype]  # of two roundings, its own and the reference's


def first_of_an_op_then_nightly():
    """Candidates of one op run the same code of choice: the first in every change, the others nightly.

    state_scan's takes 20 s in Triton's interpreter: nightly too.
    """
    seen = {"state_scan"}
    for name, label, dtype in runnable():
        marks = pytest.mark.nightly if name in seen else ()
        seen.add(name)
        yield pytest.param(name, label, dtype, marks=marks)


@pytest.mark.parametrize("name, candidate, dtype", first_of_an_op_then_nightly())
def test_a_candidate_passes_its_check_and_runs_in_every_grad_mode(name, candidate, dtype, first_start):
    op = alone(name, candidate)
    modes = FEW if name in SLOW else MODES
    for mode in modes if op.differentiable else ("inference_mode", "a Function's forward"):
        check(op, dtype, MODES[mode], first_start)


@pytest.mark.parametrize("modes", [FEW, pytest.param(tuple(MODES), marks=pytest.mark.nightly)], ids=len)
@pytest.mark.parametrize("name, backend", [("fused", Grouped), ("loop", LoopCuda)])
def test_the_experts_of_a_gpu_pass_their_check_and_run_in_every_grad_mode(
    name, backend, modes, first_start, monkeypatch
):
    op = of_a_gpu(name, backend)
    monkeypatch.setattr(expert_mlp, "OP", op)
    monkeypatch.setattr(cases, "HOT", replace(cases.SMALL, tokens=32))
    if modes == FEW:
        monkeypatch.setattr(cases, "EVERY_KIND", TWO_KINDS)
    for mode in modes:
        check(op, torch.bfloat16, MODES[mode], first_start)


@pytest.mark.parametrize("mode", MODES)
def test_control_arm_a_check_in_the_callers_grad_mode_is_seen(mode, first_start, monkeypatch):
    """As the experts' check once was: torch.autograd.grad of whatever the caller's mode has recorded."""

    def wrong(op, name, device, dtype):
        case = next(case for case in op.cases if dtype in case.dtypes)
        args = measure.arguments(case, device, dtype)
        out = op.candidates[name].load()(*args)
        torch.autograd.grad(out.sum(), [x for x in measure.tensors(args) if x.requires_grad])
        return ""

    monkeypatch.setattr(predicted, "wrong", wrong)
    op = alone("swiglu", "numba")
    if mode == "recomputed, not reentrant":  # there gradients are on
        check(op, torch.float32, MODES[mode], first_start)
        return
    with pytest.raises(RuntimeError, match="does not require grad"):
        check(op, torch.float32, MODES[mode], first_start)
