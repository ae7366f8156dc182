"""SwiGLU, GeGLU and clamped SwiGLU against float64 autograd of their formulas: every implementation that runs
here, forward and backward, stacked, interleaved and strided."""

import importlib
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from unfreeze.core.errors import ConfigError
from unfreeze.kernels import swiglu as module
from unfreeze.kernels.choice import choose as choosing
from unfreeze.kernels.choice import times
from unfreeze.kernels.choice.choose import implementation_of
from unfreeze.kernels.choice.op import Candidate, Op
from unfreeze.kernels.swiglu import OP, bucket, reference, swiglu
from unfreeze.kernels.swiglu.activation import SWIGLU, ClampedSwiGLU, GeGLU, SwiGLU

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# float32: the exponential is good to 3e-7. bf16: a rounding is 2^-8 at most and about 2^-9.3 in the mean
# square; the reference has two of them
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}


def silu(gate, up):
    return gate * torch.sigmoid(gate) * up


def gelu(gate, up):
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def clamped(gate, up):
    gate, up = torch.clamp(gate, max=1.0), torch.clamp(up, -1.0, 1.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def limited(gate, up):
    gate, up = torch.clamp(gate, max=1.0), torch.clamp(up, -1.0, 1.0)
    return up * gate * torch.sigmoid(gate)


FORMS = {  # name -> (the activation, its formula)
    "silu": (SWIGLU, silu),
    "silu, interleaved": (SwiGLU(interleaved=True), silu),
    "gelu": (GeGLU(), gelu),
    "gelu, interleaved": (GeGLU(interleaved=True), gelu),
    "clamped": (ClampedSwiGLU(limit=1.0), clamped),
    "clamped, adds nothing": (ClampedSwiGLU(alpha=1.0, limit=1.0, added=0.0), limited),
    "clamped, interleaved": (ClampedSwiGLU(interleaved=True, limit=1.0), clamped),
}


def joined(activation, gate, up):
    """[..., 2I] in the activation's layout."""
    return torch.stack((gate, up), -1).flatten(-2) if activation.interleaved else torch.cat((gate, up), -1)


def relative(got, want):
    difference, norm = (got.detach().double() - want.detach()).norm(), want.detach().norm()
    return float(difference / norm) if norm or difference else 0.0  # a clamped number's gradient is zero


def runs_here(op: Op, name: str, dtype: torch.dtype) -> None:
    reason = "" if name == "reference" else op.candidates[name].refuses(DEVICE.type, dtype)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("impl", ["reference", *OP.candidates])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 64), (3, 5, 37), (2, 1025), (1, 1), (0, 8)])
@pytest.mark.parametrize("form", FORMS)
def test_equals_float64_forward_and_backward(form, shape, dtype, impl):
    runs_here(OP, impl, dtype)
    activation, formula = FORMS[form]
    torch.manual_seed(0)
    gate, up, dh = (torch.randn(shape).to(DEVICE, dtype) for _ in range(3))
    gate64, up64 = (t.double().requires_grad_() for t in (gate, up))
    h64 = formula(gate64, up64)
    want = (h64, *torch.autograd.grad(h64, (gate64, up64), dh.double()))
    gate.requires_grad_(), up.requires_grad_()
    h = swiglu(gate, up, activation, impl=impl)
    got = (h, *torch.autograd.grad(h, (gate, up), dh))
    stacked = joined(activation, gate, up).detach().requires_grad_()
    h_stacked = swiglu(stacked, None, activation, impl=impl)
    got_stacked = (h_stacked, *activation.split(torch.autograd.grad(h_stacked, stacked, dh)[0]))
    for one, other, wanted in zip(got, got_stacked, want, strict=True):
        assert one.dtype == dtype and one.shape == other.shape == shape
        if one.numel():
            assert max(relative(one, wanted), relative(other, wanted)) <= (
                OP.tolerance[dtype] if impl == "liger" else TOLERANCE[dtype]
            )


def test_the_reference_is_exact_in_float64():
    torch.manual_seed(0)
    gate, up = (torch.randn(9, 33, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: swiglu(a, b, impl="reference"), (gate, up))


def test_it_keeps_gate_and_up_and_nothing_else():
    kept = []
    gate, up = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        swiglu(gate, up)
    assert sorted(kept) == sorted([gate.data_ptr(), up.data_ptr()])
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        F.silu(gate) * up
    assert len(kept) == 3  # control arm: plain autograd keeps silu(gate) as well


@pytest.mark.parametrize("impl", ["numba", "triton"])
def test_strided_rows_an_expanded_gradient_and_inputs_left_alone(impl):
    runs_here(OP, impl, torch.float32)
    torch.manual_seed(1)
    wide = torch.randn(6, 100, device=DEVICE)
    before = wide.clone()
    gate, up = wide[:, 3:40].detach().requires_grad_(), wide[:, 50:87].detach().requires_grad_()
    swiglu(gate, up, impl=impl).sum().backward()
    gate_c, up_c = (t.detach().clone().requires_grad_() for t in (gate, up))
    F.silu(gate_c).mul(up_c).sum().backward()
    torch.testing.assert_close(gate.grad, gate_c.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(up.grad, up_c.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("name", ["reference", "numba", "triton"])
@pytest.mark.parametrize("rows, width", [(5, 48), (9, 37), (3, 1030), (0, 8)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_weighted_backward_of_the_experts(form, in_place, name, rows, width):
    """in_place: w h takes the memory of dh, as it does on CUDA."""
    runs_here(OP, name, torch.float32)
    activation, formula = FORMS[form]
    part = implementation_of(OP, name, DEVICE, torch.float32).functions
    torch.manual_seed(2)
    gate_up, dh = torch.randn(rows, 2 * width, device=DEVICE), torch.randn(rows, width, device=DEVICE)
    weight = torch.rand(rows, device=DEVICE)
    gate64, up64 = (t.double().requires_grad_() for t in activation.split(gate_up))
    weight64 = weight.double().requires_grad_()
    h64 = formula(gate64, up64)
    weighted64 = weight64[:, None] * h64
    want = (weighted64, *torch.autograd.grad(weighted64, (gate64, up64, weight64), dh.double()))
    weighted, wide, score = (
        dh if in_place else torch.empty_like(dh),
        torch.full((rows, 2 * width + 8), 7.0, device=DEVICE),
        torch.empty(rows, device=DEVICE),
    )
    dgate, dup = activation.split(wide[:, : 2 * width])
    parts = activation.split(gate_up)
    part.backward_weighted(dh, *parts, weight, weighted, dgate, dup, score, activation)
    for got, wanted in zip((weighted, dgate, dup, score), want, strict=True):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=2e-5 if got is score else 1e-6)
    assert bool((wide[:, 2 * width :] == 7).all())  # columns beyond belong to someone else


def test_control_arm_a_wrong_slope_is_seen():
    """silu' without its second term, as a kernel that forgot it would have it."""
    torch.manual_seed(0)
    gate, up, dh = (torch.randn(64, 64) for _ in range(3))
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    reference.backward(dh, gate, up, dgate, dup)
    assert relative(dh * up * gate.sigmoid(), dgate.double()) > 50 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("form", FORMS)
def test_not_a_number_stays_one(form, name):
    """A clamp that chose the limit instead would hide a run that has diverged."""
    runs_here(OP, name, torch.float32)
    gate, up = torch.full((2, 8), 0.5), torch.full((2, 8), 0.5)
    gate[0, 3] = up[1, 5] = float("nan")
    h = swiglu(gate.to(DEVICE), up.to(DEVICE), FORMS[form][0], impl=name)
    assert h.isnan().nonzero().tolist() == [[0, 3], [1, 5]]


@pytest.mark.parametrize("form", FORMS)
def test_control_arm_another_activation_is_seen(form):
    activation, formula = FORMS[form]
    other = GeGLU() if activation.kind != "gelu" else SWIGLU
    gate, up = (torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) for i in range(2))
    want = formula(gate.double(), up.double())
    assert relative(swiglu(gate, up, activation), want) < TOLERANCE[torch.bfloat16]
    assert relative(swiglu(gate, up, other), want) > 5 * TOLERANCE[torch.bfloat16]


def test_gate_and_up_that_neither_lie_side_by_side_nor_alternate_are_refused():
    runs_here(OP, "triton", torch.float32)
    functions = implementation_of(OP, "triton", DEVICE, torch.float32).functions
    wide = torch.randn(4, 32, device=DEVICE)
    with pytest.raises(ValueError, match="do not alternate"):
        functions.forward(wide[:, 1::2], wide[:, ::2], torch.empty(4, 16, device=DEVICE))


@pytest.fixture
def liger_is_chosen(monkeypatch, tmp_path):
    """As on a GPU with liger-kernel, in whose timings it won: planted(functions, refused) -> what an op gets
    that writes its own backward. Candidates are checked as there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNFREEZE_KERNELS", raising=False)
    monkeypatch.setattr(choosing, "CHECKED", ("cpu",))
    monkeypatch.setattr(choosing, "_WRONG", {})
    monkeypatch.setattr(choosing, "_loaded", lambda op, name, load: load())

    def planted(functions, refused="", wrong=None):
        triton = Candidate(lambda: module.SwiGLU(functions), lambda *_: refused)
        under_autograd = Candidate(lambda: lambda *given: OP.reference(*given), lambda *_: "")
        op = replace(OP, candidates={"liger": under_autograd, "triton": triton})
        monkeypatch.setattr(module, "OP", op)
        gate = torch.randn(16, 32, dtype=torch.bfloat16)
        kind = bucket(gate)
        choosing.fix({("swiglu", "bfloat16", kind): choosing.Choice("liger", "", "timed here")})
        if wrong is not None:
            us = {"reference": 3.0, "liger": 1.0} | ({} if wrong else {"triton": 2.0})
            row = {"op": "swiglu", "dtype": "bfloat16", "bucket": kind, "runs": "liger", "us": us}
            assert times.keep([row | {"wrong": {"triton": wrong} if wrong else {}, "date": "2026-01-01"}])
        return [module.functions_for(gate) for _ in range(2)][1]

    return planted


class ForgetsUp:
    """A kernel that is right under autograd, and wrong in the function that experts call."""

    forward, backward = staticmethod(reference.forward), staticmethod(reference.backward)

    @staticmethod
    def backward_weighted(dh, gate, up, weight_n, weighted, dgate, dup, score_n, activation=SWIGLU):
        reference.backward_weighted(dh, gate, up, weight_n, weighted, dgate, dup, score_n, activation)
        dup.zero_()


class Right(ForgetsUp):
    backward_weighted = staticmethod(reference.backward_weighted)


def test_where_liger_is_chosen_experts_run_by_tritons_functions(liger_is_chosen):
    """Liger has no function that an op with a backward of its own could call; plain torch takes several passes."""
    assert liger_is_chosen(Right) is Right
    chosen = [(i.impl, choice.runs) for i, choice in choosing.choices().items() if i.op == "swiglu"]
    assert chosen == [("auto", "liger"), ("triton if right", "triton")]


@pytest.mark.parametrize("refused, functions", [("triton is not installed", Right), ("", ForgetsUp)])
def test_where_liger_is_chosen_and_triton_cannot_run_or_is_wrong_they_are_plain_torchs(
    refused, functions, liger_is_chosen, caplog
):
    assert liger_is_chosen(functions, refused) is reference
    assert ("fails its check" in caplog.text) == (not refused)


@pytest.mark.parametrize("wrong, functions, got", [("error 1", Right, reference), ("", ForgetsUp, ForgetsUp)])
def test_what_this_card_was_found_to_compute_decides(wrong, functions, got, liger_is_chosen):
    """A check at the card's first start is not made again, whatever it found."""
    assert liger_is_chosen(functions, wrong=wrong) is got


def test_refusals_name_the_reason_and_buckets_cover_the_cases():
    with pytest.raises(ConfigError, match="float64"):
        swiglu(torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64), impl="numba")
    assert OP.candidates["triton"].refuses("cpu", torch.bfloat16)  # without a GPU, or in the interpreter
    generator = torch.Generator().manual_seed(0)
    for case in OP.cases:
        assert bucket(*case.inputs(torch.device("cpu"), torch.float32, generator)) == case.bucket
    if importlib.util.find_spec("liger_kernel") is None:
        assert OP.candidates["liger"].refuses("cuda", torch.bfloat16) == "liger-kernel is not installed"
