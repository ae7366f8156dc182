"""Predicted candidates: they run without a record once they are found right; a record decides otherwise."""

import importlib.util
import logging
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.choice.small_cases import SMALL, small
from unfreeze.kernels.choice import choose as choosing
from unfreeze.kernels.choice import op as declared
from unfreeze.kernels.choice import ops, predicted, record
from unfreeze.kernels.choice.choose import by_record
from unfreeze.kernels.choice.op import Candidate, Case, Op
from unfreeze.kernels.expert_mlp import ExpertFactors, backend, fused_expert_mlp, release_scratch, workspace
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

CPU, F32 = torch.device("cpu"), torch.float32
PREDICTED = {
    "adamw",
    "expand",
    "grouped_mm",
    "int4_grouped_mm",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "state_scan",
    "swiglu",
    "token_order",
}  # Triton's kernels
OTHERS = {"packed_attention", "replay"}  # by what a CPU does not have: checked on a GPU only


def doubling(candidate):
    """x -> 2 x, with one candidate that is predicted on a CPU."""
    made = Candidate(lambda: candidate, lambda *_: "", predicted_on=("cpu",), because="1 byte")
    case = Case("any", lambda d, t, g: (torch.randn(8, generator=g).to(d, t).requires_grad_(),))
    return Op("double", lambda x: x + x, {"quick": made}, (case,), {F32: 1e-6})


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch, tmp_path):
    for name in ("_CHOSEN", "_WRONG"):
        monkeypatch.setattr(choosing, name, {})
    for module in (choosing, record):
        monkeypatch.setattr(module, "device_key", lambda device: "nvidia-h200")
    monkeypatch.setattr(choosing, "CHECKED", ("cpu", "cuda"))  # the planted ones, as a GPU's are
    monkeypatch.setattr(record, "COMMITTED", tmp_path)
    monkeypatch.setattr(record, "user_folder", lambda: tmp_path / "user")
    choosing._loaded.cache_clear(), record.read.cache_clear()
    yield
    choosing._loaded.cache_clear(), record.read.cache_clear()


def test_a_right_one_runs_and_says_that_it_was_not_measured():
    assert by_record(doubling(lambda x: 2 * x), CPU, F32, "any")[:2] == (
        "quick",
        "predicted, not measured here: 1 byte",
    )


@pytest.mark.parametrize("candidate", [lambda x: 2.001 * x, lambda x: x.sqrt_(), lambda x: 2 * x.detach()])
def test_a_wrong_one_gives_way_to_the_reference_with_a_warning(candidate, caplog):
    op = doubling(candidate)
    with caplog.at_level(logging.WARNING):
        assert by_record(op, CPU, F32, "any")[0] == "reference"
        assert by_record(op, CPU, F32, "any")[0] == "reference"
    assert len(caplog.records) == 1 and "fails its check" in caplog.text


@pytest.mark.parametrize("median, runs", [(50.0, "quick"), (99.0, "reference"), (150.0, "reference")])
def test_a_record_decides_in_both_directions(median, runs, monkeypatch):
    of = {"device": "nvidia-h200", "candidate": "quick", "error_forward": 0.0, "error_backward": 0.0}
    times = {"median_us": median, "reference_median_us": 100.0, "spread_us": 1.0, "reference_spread_us": 1.0}
    row = {**of, **times, "op": "double", "dtype": "float32", "bucket": "any", "date": "2026-01-31"}
    monkeypatch.setattr(choosing, "record_rows", lambda *_: [row])
    assert by_record(doubling(lambda x: 2 * x), CPU, F32, "any")[0] == runs


def test_a_record_does_not_prove_a_kernel_right_with_another_torch_or_driver(monkeypatch):
    """It names a class of cards; the check is of this card, with what is installed on it."""
    of = {"device": "nvidia-h200", "candidate": "quick", "error_forward": 0.0, "error_backward": 0.0}
    times = {"median_us": 50.0, "reference_median_us": 100.0, "spread_us": 1.0, "reference_spread_us": 1.0}
    row = {**of, **times, "op": "double", "dtype": "float32", "bucket": "any", "date": "2026-01-31"}
    monkeypatch.setattr(choosing, "record_rows", lambda *_: [row])
    choice = by_record(doubling(lambda x: 2.001 * x), CPU, F32, "any")
    assert (
        choice.runs == "reference"
        and "quick failed its check: error 5.0e-04, tolerance 1.0e-06" in choice.why
    )


def test_the_reason_of_a_ban_is_part_of_the_choice_and_the_next_one_runs():
    """Events and report show `why`: the log alone does not last."""
    op = doubling(lambda x: 2.001 * x)
    right = Candidate(lambda: lambda x: 2 * x, lambda *_: "", predicted_on=("cpu",), because="2 bytes")
    both = replace(op, candidates={**op.candidates, "plain": right})
    assert by_record(both, CPU, F32, "any")[:2] == (
        "plain",
        "predicted, not measured here: 2 bytes; quick failed its check: error 5.0e-04, tolerance 1.0e-06",
    )
    assert "quick failed its check" in by_record(op, CPU, F32, "any").why


class Parts:
    """An implementation with a function that others call."""

    def __init__(self, times):
        self.times = times

    def __call__(self, x):
        return 2 * x

    def into(self, x, out):
        out.copy_(self.times * x)


def test_a_function_that_others_call_is_checked_too():
    """An op may be right as autograd sees it, and wrong in what its caller uses (swiglu's backward)."""

    def inputs(device, dtype, generator):
        return torch.randn(8, generator=generator).to(device, dtype), torch.zeros(8, dtype=dtype)

    use = Case("any", inputs, function=lambda implementation: implementation.into, name="into")
    for times, runs in ((2, "quick"), (2.001, "reference")):
        op = replace(doubling(Parts(times)), reference=Parts(2), uses=(use,))
        choosing._WRONG.clear(), choosing._loaded.cache_clear()
        choice = by_record(op, CPU, F32, "any")
        assert choice.runs == runs and ("into: error" in choice.why) == (runs == "reference")


def test_which_ops_are_predicted_on_a_gpu_and_at_which_shapes():
    found = {
        name: {
            case.bucket
            for case in op.cases
            if any(c.predicted("cuda", case.bucket) for c in op.candidates.values())
        }
        for name, op in ((name, ops.import_op(name)) for name in ops.OPS)
    }
    assert {name for name, buckets in found.items() if buckets} == PREDICTED | OTHERS
    assert found["int4_grouped_mm"] == {"up to 8", "up to 64"}
    for name in PREDICTED | OTHERS:
        candidates = ops.import_op(name).candidates.values()
        assert all(
            "byte" in c.because or "launch" in c.because for c in candidates if "cuda" in c.predicted_on
        )
        assert not any("cuda" in c.predicted_on and c.predicted("cpu", "any") for c in candidates)


# 2 to 12 s in the interpreter; a small case of each is in every suite, of expand in test_grad_modes.py
SLOW = (*(name for name in SMALL if name in PREDICTED), "expand")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "name, made",
    [(name, small) for name in SLOW if name in SMALL]
    + [
        pytest.param(name, ops.import_op, marks=[pytest.mark.nightly] * (name in SLOW))
        for name in sorted(PREDICTED)
    ],
)
def test_every_predicted_kernel_passes_its_check(name, made):
    """In Triton's interpreter, in float32."""
    op = made(name)
    if op.candidates["triton"].refuses("cpu", F32):
        pytest.skip("the interpreter is not on")
    for label, candidate in op.candidates.items():
        if "cuda" in candidate.predicted_on:
            assert predicted.wrong(op, label, CPU, F32) == "", label


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def h200(monkeypatch, interpreted):
    """Tensors on meta are asked about as if on an H200; kernels launch nothing."""
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(predicted, "wrong", lambda *_: "")
    monkeypatch.setattr(declared, "capability", lambda device: (9, 0))
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    for kernel in (jit.JITFunction, interpreter.InterpretedFunction):
        monkeypatch.setattr(kernel, "run", lambda *_, **__: None)
    real = choosing._choose

    def on_cuda(op, device, dtype, bucket, impl):
        return real(op, torch.device("cuda", 0) if device.type == "meta" else device, dtype, bucket, impl)

    monkeypatch.setattr(choosing, "_choose", on_cuda)


def kimi_layer(experts, tokens):
    """Its arguments, on meta."""
    T, K, D, I, R = tokens, 8, 7168, 2048, 16

    def meta(*shape, dtype=F32, grad=True):
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)

    def packed(rows, columns):
        words = meta(experts, rows, columns // 8, dtype=torch.int32, grad=False)
        scales = meta(experts, rows, columns // 32, dtype=torch.bfloat16, grad=False)
        return Packed(Int4(32), {"weight_packed": words, "weight_scale": scales})

    factors = ExpertFactors(
        meta(experts, 2 * R, D), meta(experts, 2 * I, R), meta(experts, R, I), meta(experts, D, R)
    )
    x, ids = meta(T, D, dtype=torch.bfloat16), meta(T, K, dtype=torch.int64, grad=False)
    return x, ids, meta(T, K), packed(2 * I, D), packed(D, I), factors


@pytest.mark.parametrize("experts", [48, 384])
def test_a_layer_of_kimi_k2_takes_200_operations_a_pass(experts, h200, monkeypatch):
    """384 go in five groups."""
    args = kimi_layer(experts, 8192)
    ends = [(e + 1) * 8192 * 8 // experts for e in range(experts)]
    monkeypatch.setattr(backend.DeviceRouting, "ends", ends)
    release_scratch()
    with Count() as forward:
        y = fused_expert_mlp(*args, Grouped())
    with Count() as backward:
        y.backward(torch.empty_like(y))
    assert forward.ops <= 200 and backward.ops <= 200
    release_scratch()


def test_control_arm_references_take_thousands_of_operations(h200, monkeypatch):
    monkeypatch.setattr(predicted, "wrong", lambda *_: "planted")
    monkeypatch.setattr(workspace, "WORKSPACE", 1 << 40)
    args = kimi_layer(384, 8192)
    release_scratch()
    with Count() as forward:
        fused_expert_mlp(*args, Grouped())
    assert forward.ops > 2000
    release_scratch()


def test_a_decoding_step_expands_no_expert(h200, monkeypatch):
    monkeypatch.setattr(workspace, "expand_stack", lambda *_: pytest.fail("expanded"))
    args = kimi_layer(48, 48)  # 8 rows of each expert
    with torch.no_grad():
        assert fused_expert_mlp(*args, Grouped()).shape == args[0].shape
    monkeypatch.setattr(choosing, "_CHOSEN", {})
    monkeypatch.setattr(predicted, "wrong", lambda *_: "planted")
    monkeypatch.setattr(choosing, "_WRONG", {})
    with torch.no_grad(), pytest.raises(pytest.fail.Exception, match="expanded"):  # control arm
        fused_expert_mlp(*args, Grouped())
