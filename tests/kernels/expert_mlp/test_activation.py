"""Experts with other activations than SwiGLU, interleaved rows and a bias: on every backend against float64 by plain
autograd, whose formulas are written out here (gpt-oss's from its reference, gelu torch's)."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unfreeze.kernels.expert_mlp import (
    SWIGLU,
    ClampedSwiGLU,
    GeGLU,
    SquaredReLU,
    fused_expert_mlp,
    panels_cpu,
    reference_expert_mlp,
)
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.expert_mlp.loop_cpu import LoopCpu
from unfreeze.kernels.expert_mlp.loop_cuda import LoopCuda
from unfreeze.kernels.swiglu.activation import SwiGLU

_spec = importlib.util.spec_from_file_location(
    "expert_mlp_problem", Path(__file__).with_name("test_expert_mlp.py")
)
assert _spec is not None and _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)


def silu(gate, up):
    return gate * torch.sigmoid(gate) * up


def gelu(gate, up):
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def clamped(gate, up):
    gate, up = torch.clamp(gate, max=1.0), torch.clamp(up, -1.0, 1.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


FORMS = {  # name -> (the activation, its formula)
    "interleaved": (SwiGLU(interleaved=True), silu),
    "gelu": (GeGLU(), gelu),
    "clamped": (ClampedSwiGLU(interleaved=True, limit=1.0), clamped),
}


def float64(args, bias, activation, formula):
    """(y, gradients): a loop over tokens and slots, weights merged with their adapters."""
    x, ids, _, _, down, factors = args
    named = {**oracle.leaves(*args), "bias": bias}
    d = {name: tensor.detach().double().requires_grad_() for name, tensor in named.items()}
    I, R = down.shape[-1], factors.gate_up_B.shape[2]
    stride = (
        (slice(0, None, 2), slice(1, None, 2)) if activation.interleaved else (slice(0, I), slice(I, None))
    )
    B, A = d["gate_up_B"], d["gate_up_A"]
    deltas = (B[:, :I] @ A[:, :R], B[:, I:] @ A[:, R:])
    bases = [
        d["gate_up"][:, rows] + factors.scale * delta for rows, delta in zip(stride, deltas, strict=True)
    ]
    biases = [d["bias"][:, rows] for rows in stride]
    W2 = d["down"] + factors.down_scale * d["down_B"] @ d["down_A"]
    y = []
    for t in range(len(ids)):
        total = torch.zeros(x.shape[1], dtype=torch.float64)
        for k, e in enumerate(ids[t].tolist()):
            gate, up = (W[e] @ d["x"][t] + b[e] for W, b in zip(bases, biases, strict=True))
            total = total + d["weights"][t, k] * (W2[e] @ formula(gate, up))
        y.append(total)
    y = torch.stack(y)
    grads = torch.autograd.grad(y, list(d.values()), oracle.output_grad(x).double())
    return y, dict(zip(d, grads, strict=True))


BACKENDS = {
    "loop": (LoopCpu, torch.float32),
    "loop-bf16": (LoopCpu, torch.bfloat16),
    "grouped": (Grouped, torch.bfloat16),
}


def computed(function, args, bias, activation):
    y = function(*args, activation=activation, gate_up_bias=bias)
    named = {**oracle.leaves(*args), "bias": bias}
    grads = torch.autograd.grad(y, list(named.values()), oracle.output_grad(args[0]))
    return y, dict(zip(named, grads, strict=True))


def prepared(dtype, seed=0):
    args = oracle.problem(E=4, D=32, I=16, R=4, T=24, K=2, dtype=dtype, packed=False, seed=seed)
    bias = torch.randn(4, 32, generator=torch.Generator().manual_seed(7)).to(dtype).requires_grad_()
    return args, bias


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*BACKENDS, "reference"])
def test_forward_and_every_gradient_equal_float64(name, form):
    activation, formula = FORMS[form]
    backend, dtype = BACKENDS.get(name, (None, torch.float32))
    args, bias = prepared(dtype)

    def function(*args, **more):
        return (
            reference_expert_mlp(*args, **more)
            if backend is None
            else fused_expert_mlp(*args, backend(), **more)
        )

    y, grads = computed(function, args, bias, activation)
    expected, wanted = float64(args, bias, activation, formula)
    tolerance = oracle.TOLERANCE[dtype] * (
        2 if dtype == torch.bfloat16 else 1
    )  # two roundings more: the bias
    assert oracle.error(y, expected) <= tolerance
    for key, gradient in grads.items():
        assert oracle.error(gradient, wanted[key]) <= tolerance, key


def up_alone(dtype):
    """The problem without its gates, and (y, gradients) in float64: every expert for every token."""
    x, ids, weights, gate_up, down, factors = prepared(dtype)[0]
    I, R = down.shape[-1], factors.gate_up_B.shape[2]

    def cut(tensor, rows):
        return tensor.detach()[:, :rows].clone().requires_grad_()

    factors = replace(factors, gate_up_A=cut(factors.gate_up_A, R), gate_up_B=cut(factors.gate_up_B, I))
    args = (x, ids, weights, cut(gate_up, I), down, factors)
    d = {name: tensor.detach().double().requires_grad_() for name, tensor in oracle.leaves(*args).items()}
    W1 = d["gate_up"] + factors.scale * d["gate_up_B"] @ d["gate_up_A"]
    W2 = d["down"] + factors.down_scale * d["down_B"] @ d["down_A"]
    h_ETI = torch.relu(torch.einsum("td,eid->eti", d["x"], W1)) ** 2
    y_TED = torch.einsum("eti,edi->ted", h_ETI, W2)
    chosen_TKD = y_TED.gather(1, ids[..., None].expand(-1, -1, x.shape[1]))
    y = (d["weights"][..., None] * chosen_TKD).sum(1)
    return (
        args,
        y,
        dict(zip(d, torch.autograd.grad(y, list(d.values()), oracle.output_grad(x).double()), strict=True)),
    )


@pytest.mark.parametrize("name", [*BACKENDS, "loop on cuda", "reference"])
def test_experts_without_a_gate_equal_float64(name):
    backend, dtype = {**BACKENDS, "loop on cuda": (LoopCuda, torch.float32)}.get(name, (None, torch.float32))
    args, expected, wanted = up_alone(dtype)
    more = {"activation": SquaredReLU()}
    y = reference_expert_mlp(*args, **more) if backend is None else fused_expert_mlp(*args, backend(), **more)
    named = oracle.leaves(*args)
    grads = torch.autograd.grad(y, list(named.values()), oracle.output_grad(args[0]))
    tolerance = oracle.TOLERANCE[dtype] * (2 if dtype == torch.bfloat16 else 1)  # as above
    assert oracle.error(y, expected) <= tolerance
    for key, gradient in zip(named, grads, strict=True):
        assert oracle.error(gradient, wanted[key]) <= tolerance, key


def test_control_the_rows_taken_as_halves_are_seen():
    args, bias = prepared(torch.float32)
    y, _ = computed(lambda *a, **m: fused_expert_mlp(*a, LoopCpu(), **m), args, bias, SWIGLU)
    expected, _ = float64(args, bias, FORMS["interleaved"][0], silu)
    assert oracle.error(y, expected) > 0.1


def test_panels_refuse_what_their_loops_cannot_compute(caplog):
    panels_cpu._say_refused.cache_clear()  # said once in a process, whichever test came first
    args = oracle.problem(dtype=torch.bfloat16)
    with caplog.at_level("INFO"):
        assert not panels_cpu.supports(torch.bfloat16, args[3], args[4], ClampedSwiGLU(interleaved=True))
        assert not panels_cpu.supports(torch.bfloat16, args[3], args[4], SWIGLU, torch.zeros(6, 64))
    assert "not ClampedSwiGLU" in caplog.text and "SwiGLU with a bias" in caplog.text


def test_nothing_expanded_is_saved():
    """What autograd holds of a clamped call with a packed base: no tensor as large as an expert's matrices."""
    x, ids, weights, gate_up, down, factors = oracle.problem(E=4, D=64, I=32, T=8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = fused_expert_mlp(
            x, ids, weights, gate_up, down, factors, LoopCpu(), activation=ClampedSwiGLU(interleaved=True)
        )
    y.sum().backward()
    assert kept and not any(len(shape) == 3 and shape[-2:] in ((64, 64), (64, 32)) for shape in kept)
