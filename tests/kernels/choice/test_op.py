"""Every op of the room keeps the contract: it is on the list, its cases are of the buckets they say, and each
candidate that can run on this
machine agrees with the reference in float64, forward and backward. CUDA candidates are held to the same where
there is a GPU.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.choice.small_cases import COMPARED_SMALL, to_compare
from unfreeze.core.cpu import multiplies_bf16
from unfreeze.core.errors import ConfigError
from unfreeze.kernels.choice import choose, measure, ops, record
from unfreeze.kernels.choice.op import Candidate, Case, Op, capability

ROOM = Path(ops.__file__).parents[1]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
CASES = [
    pytest.param(name, i, id=f"{name}, {case.bucket}")
    for name in ops.OPS
    for i, case in enumerate(ops.import_op(name).cases)
]

LARGE = {  # seconds each: nightly, and the op's smaller cases here
    "adamw": ("large tensors, as they are", "large tensors, half precision weights"),
    "attention": ("2048 on", "2048 on, v < d"),
    "linear_cross_entropy": ("large vocabulary, head frozen", "large vocabulary, head trained"),
    "rotary": ("over 4M",),
    "swiglu": ("over 4M", "over 4M, gelu", "over 4M, clamped"),
    "token_order": ("over 32k",),
}


def is_large(name, index):
    return ops.import_op(name).cases[index].bucket in LARGE.get(name, ())


def is_slow(name, dtype, device):
    """A GEMM in bf16 on a CPU without units for it: 40 times as long as in float32, which is compared there."""
    narrow = dtype == torch.bfloat16 and device == "cpu" and not multiplies_bf16()
    return narrow and name == "linear_cross_entropy"


COMPARED = [  # and of the cases that are small here, their own sizes nightly
    pytest.param(
        *case.values,
        ops.import_op,
        id=case.id,
        marks=[pytest.mark.nightly] * (is_large(*case.values) or case.values[0] in COMPARED_SMALL),
    )
    for case in CASES
] + [
    pytest.param(*case.values, to_compare, id=f"{case.id}, small")
    for case in CASES
    if case.values[0] in COMPARED_SMALL and not is_large(*case.values)
]


def test_what_is_compared_small_has_the_buckets_and_dtypes_of_the_op():
    for name in COMPARED_SMALL:
        own, here = ops.import_op(name).cases, to_compare(name).cases
        assert [(c.bucket, c.dtypes) for c in own] == [(c.bucket, c.dtypes) for c in here]


def on_the_list(folder):
    """What the list of ops lacks: folders whose __init__ has an OP."""
    with_op = {
        init.parent.name
        for init in folder.glob("*/__init__.py")
        if any(line.startswith("OP = ") for line in declared(init))
    }
    return with_op ^ {home.partition(".")[0] for home in ops.OPS.values()}


def declared(init):
    return [
        line for path in init.parent.glob("*.py") for line in path.read_text(encoding="utf-8").splitlines()
    ]


def test_every_folder_with_an_op_is_on_the_list(tmp_path):
    assert on_the_list(ROOM) == set()
    (tmp_path / "forgotten").mkdir()  # control arm
    (tmp_path / "forgotten" / "__init__.py").write_text("OP = Op()\n")
    assert "forgotten" in on_the_list(tmp_path)


@pytest.mark.parametrize("name", ops.OPS)
def test_an_op_bears_the_name_it_is_listed_by_and_declares_what_is_measured(name):
    op = ops.import_op(name)
    assert op.name == name and op.candidates and op.cases and callable(ops.public(name))
    assert len({case.bucket for case in op.cases}) == len(op.cases), (
        "two cases for one bucket: a record could not say which it is of"
    )
    assert {dtype for case in op.cases for dtype in case.dtypes} <= set(op.tolerance)
    assert not op.preferred or (op.preferred in op.candidates and op.because)
    assert not op.instead or (op.preferred and op.instead in op.candidates)
    for candidate in op.candidates.values():
        assert candidate.refuses("meta", torch.float32), (
            "a candidate runs on devices it was written for, and says so of others"
        )


def test_an_unknown_op_names_the_nearest():
    with pytest.raises(ConfigError, match="no op 'rmsnorm'; nearest: 'rms_norm'"):
        ops.import_op("rmsnorm")


class Asked(Exception):
    pass


def first_asked(op, public, case, device, dtype, monkeypatch):
    """The first bucket for which the public function asks, which then computes nothing: seconds where it is large."""

    def stop(op, device, dtype, bucket, impl):
        raise Asked(op.name, dtype, bucket)

    monkeypatch.setattr(choose, "_choose", stop)
    with torch.set_grad_enabled(op.differentiable), pytest.raises(Asked) as stopped:
        public(*measure.arguments(case, device, dtype))
    assert stopped.value.args[:2] == (op.name, dtype)
    return {stopped.value.args[2]}


def asked(op, public, case, device, dtype):
    """The buckets for which the public function asks choose()."""
    args = measure.arguments(case, device, dtype)
    with torch.set_grad_enabled(op.differentiable):
        public(*args)
    return {
        bucket for name, _, its_dtype, bucket, _ in choose._CHOSEN if name == op.name and its_dtype == dtype
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, index", CASES)
def test_a_case_is_of_the_bucket_it_says(name, index, device, monkeypatch):
    op, public = ops.import_op(name), ops.public(name)
    case = op.cases[index]
    for dtype in case.dtypes:
        monkeypatch.setattr(choose, "_CHOSEN", {})
        given = op, public, case, torch.device(device), dtype
        quick = is_large(name, index) or is_slow(name, dtype, device)
        found = first_asked(*given, monkeypatch) if quick else asked(*given)
        assert found == {case.bucket}


def test_what_is_compared_nightly_alone_has_a_smaller_case_of_the_same_dtypes_here():
    for name, large in LARGE.items():
        op = ops.import_op(name)
        here = [case for case in op.cases if case.bucket not in large]
        assert {case.bucket for case in op.cases} >= set(large)
        assert {dtype for case in op.cases for dtype in case.dtypes} == {
            d for case in here for d in case.dtypes
        }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, index, made", COMPARED)
def test_each_candidate_agrees_with_the_reference_in_float64_forward_and_backward(name, index, made, device):
    op, where = made(name), torch.device(device)
    case, held = op.cases[index], 0
    for dtype in case.dtypes:
        if is_slow(name, dtype, device):
            continue
        truth = measure.Truth(op, case, where, dtype)
        own = truth.errors(op.reference)
        assert max(own.forward, own.backward) <= op.tolerance[dtype], (
            f"the reference itself is off in {dtype}: {own}"
        )
        for label, candidate in op.candidates.items():
            # g++ would take longer than the whole suite
            if not candidate.can(device, dtype, case.bucket) or device in candidate.named_on:
                continue
            errors = truth.errors(choose.implementation_of(op, label, where, dtype))
            assert max(errors.forward, errors.backward) <= op.tolerance[dtype], (
                f"{label} in {dtype}: {errors}"
            )
            held += 1
    chosen = [c for c in op.candidates.values() if device not in c.named_on]
    assert (
        held
        or device == "cuda"
        or not any(c.can(device, d, case.bucket) for c in chosen for d in case.dtypes)
    )


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_control_arm_a_candidate_that_is_a_hundredth_off_is_seen(fault):
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * (2.02 if fault == "forward" else 2.0)

        @staticmethod
        def backward(ctx, grad):
            return grad * (2.02 if fault == "backward" else 2.0)

    case = Case(
        "any",
        lambda device, dtype, generator: (
            torch.randn(64, generator=generator).to(device, dtype).requires_grad_(),
        ),
    )
    op = Op(
        "double",
        lambda x: x + x,
        {"off": Candidate(lambda: Off.apply, lambda *_: "")},
        (case,),
        {torch.float32: 1e-6},
    )
    errors = measure.Truth(op, case, torch.device("cpu"), torch.float32).errors(Off.apply)
    assert (
        getattr(errors, fault) == pytest.approx(0.01, rel=1e-3) and min(errors.forward, errors.backward) == 0
    )


ON_GPU = {"triton", "liger", "cuda", "varlen", "loop"}


def test_what_is_for_gpus_says_that_it_waits_for_its_first_rows():
    """With the first committed rows of a GPU this fails: each candidate then stays by them, or goes."""
    waits = {
        (op, name)
        for op in ops.OPS
        for name, candidate in ops.import_op(op).candidates.items()
        if candidate.waits_on
    }
    assert waits == {
        (op, name)
        for op in ops.OPS
        for name in ops.import_op(op).candidates
        if name.partition("_")[0] in ON_GPU
    }
    assert {file.name.partition("-")[0] for file in record.COMMITTED.glob("*.json")} == {"cpu"}


@pytest.mark.parametrize(
    ("name", "wanted"), [("gfx942:sramecc+", (9, 0)), ("gfx90a", (8, 0)), ("gfx1100", (8, 0))]
)
def test_amd_s_gpus_count_by_the_fast_paths_that_torch_has_for_them(name, wanted, monkeypatch):
    """torch's own numbers of gfx90a are (9, 0), as those of an H100."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=name))
    capability.cache_clear()
    assert capability(torch.device("cuda", 0)) == wanted
    capability.cache_clear()
