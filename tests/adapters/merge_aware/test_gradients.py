"""Gradients through the rounding against float64 autograd of the plain formula with (w + (q - w).detach())."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.adapters.merge_aware import RoundedExperts, RoundedLowRank, Rounding, matrix
from unfreeze.kernels.expert_mlp import SWIGLU, ClampedSwiGLU
from unfreeze.models.blocks.experts import BiasedExperts, Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.saved import Saved
from unfreeze.quant.int4 import Int4

E, D, I, R, T, K = 6, 64, 32, 4, 40, 2
TOLERANCE = 1e-6  # of the norm: float32 sums of some hundred terms, observed at most 3e-7
CODEC = Int4(32)
FACTORS = ("gate_up_A", "gate_up_B", "down_A", "down_B")


def drawn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def put(module, weight) -> None:
    """A weight into a layer: its codes if it is packed."""
    if module.codec is None:
        module.weight.data.copy_(weight)
        module.weight.requires_grad_(False)
        return
    for suffix, part in CODEC.quantize(weight.bfloat16()).items():
        getattr(module, suffix).copy_(part)


def straight(W, A, B, scale, rounding):
    """w + (q - w).detach() in float64, q by the codec alone."""
    w = W.double() + scale * B.double() @ A.double()
    merged = W + (B.detach().float() @ A.detach().float()).mul_(scale)
    q = CODEC.dequantize(CODEC.quantize(merged))
    return w + (q.double() - w).detach()


def far(ours, theirs) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


def linear(packed: bool, bias: bool = True):
    layer = Linear(64, 48, bias=bias, codec=CODEC if packed else None, dtype=torch.float32, device="cpu")
    put(layer, drawn(48, 64, seed=1, scale=0.1))
    if bias:
        layer.bias.data.copy_(drawn(48, seed=2))
        layer.bias.requires_grad_(False)
    adapter = LowRank(64, 48, R, 1.5)
    adapter.A.data.copy_(drawn(R, 64, seed=3, scale=0.2))
    adapter.B.data.copy_(drawn(48, R, seed=4, scale=0.2))
    layer.adapter = RoundedLowRank(adapter, Rounding(None if packed else CODEC))
    return layer


def of_linear(packed: bool, dtype=torch.float32) -> dict[str, float]:
    layer, x = linear(packed), drawn(T, 64, seed=5).requires_grad_()
    dy = drawn(T, 48, seed=6)
    y = layer(x)
    y.backward(dy)
    A, B = (p.detach().double().requires_grad_() for p in (layer.adapter.A, layer.adapter.B))
    x64 = x.detach().double().requires_grad_()
    W = layer.matrix().detach().float()
    y64 = x64 @ straight(W, A, B, 1.5, layer.adapter.rounding).t() + layer.bias.double()
    y64.backward(dy.double())
    pairs = {"y": (y, y64), "dx": (x.grad, x64.grad)}
    pairs |= {"dA": (layer.adapter.A.grad, A.grad), "dB": (layer.adapter.B.grad, B.grad)}
    return {name: far(ours.detach(), theirs.detach()) for name, (ours, theirs) in pairs.items()}


def experts(packed: bool, kind=Experts, activation=SWIGLU):
    layer = kind(
        E, D, I, codec=CODEC if packed else None, dtype=torch.float32, device="cpu", activation=activation
    )
    for parameter in layer.parameters():
        parameter.requires_grad_(False).copy_(drawn(*parameter.shape, seed=7))
    put(layer.gate_up_proj, drawn(E, 2 * I, D, seed=1, scale=0.2))
    put(layer.down_proj, drawn(E, D, I, seed=2, scale=0.2))
    adapter = ExpertLowRank(E, D, I, gate_up_rank=R, down_rank=R, scale=1.5, down_scale=0.7)
    for number, (_, parameter) in enumerate(adapter.named_parameters()):
        parameter.data.copy_(drawn(*parameter.shape, seed=10 + number, scale=0.2))
    rounding = Rounding(None if packed else CODEC, halves=not activation.interleaved)
    layer.adapter = RoundedExperts(adapter, {"gate_up_proj": rounding, "down_proj": rounding})
    return layer


def inputs():
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)])
    return drawn(T, D, seed=20).requires_grad_(), ids, torch.rand(T, K).requires_grad_(), drawn(T, D, seed=21)


def dense(weight):
    return (weight if isinstance(weight, torch.Tensor) else weight.dequantize()).detach().float()


def of_experts(layer) -> dict[str, float]:
    x, ids, weights, dy = inputs()
    y = layer(x, ids, weights)
    y.backward(dy)
    adapter, act = layer.adapter, layer.activation
    A1, B1, A2, B2 = (getattr(adapter, name).detach().double().requires_grad_() for name in FACTORS)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weights))
    gate_up, down = dense(layer.gate_up_proj.value()), dense(layer.down_proj.value())
    y64 = torch.zeros(T, D, dtype=torch.float64)
    biases = layer.biases()
    for e in range(E):
        token, slot = torch.where(ids == e)
        rows = act.split(gate_up[e], 0)
        bias = (0.0, 0.0) if biases[0] is None else act.split(biases[0][e].double(), 0)
        halves = zip(rows, A1[e].chunk(2), B1[e].chunk(2), bias, strict=True)
        gate, up = (
            x64[token] @ straight(W, A, B, 1.5, adapter.roundings["gate_up_proj"]).t() + b
            for W, A, B, b in halves
        )
        h = F.silu(gate) * up if act == SWIGLU else act.forward(gate, up)
        out = h @ straight(down[e], A2[e], B2[e], 0.7, adapter.roundings["down_proj"]).t()
        if biases[1] is not None:
            out = out + biases[1][e].double()
        y64 = y64.index_add(0, token, w64[token, slot, None] * out)
    y64.backward(dy.double())
    pairs = {"y": (y, y64), "dx": (x.grad, x64.grad), "weights": (weights.grad, w64.grad)}
    pairs |= {n: (getattr(adapter, n).grad, g.grad) for n, g in zip(FACTORS, (A1, B1, A2, B2), strict=True)}
    return {name: far(ours.detach(), theirs.detach()) for name, (ours, theirs) in pairs.items()}


@pytest.mark.parametrize("packed", [True, False])
def test_a_linear_layers_output_and_gradients_equal_float64(packed):
    errors = of_linear(packed)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("packed", [True, False])
def test_experts_output_and_gradients_equal_float64(packed):
    errors = of_experts(experts(packed))
    assert max(errors.values()) < TOLERANCE, errors


def test_so_do_interleaved_experts_with_biases():
    act = ClampedSwiGLU(alpha=1.702, limit=7.0)
    errors = of_experts(experts(True, BiasedExperts, act))
    assert max(errors.values()) < TOLERANCE, errors


def test_control_arm_a_forward_without_the_rounding_is_seen(monkeypatch):
    def plain(base, change, scales, out, *own):
        out.copy_(base.dequantize().float() + change)

    monkeypatch.setattr(matrix, "_in_place", plain)
    assert of_linear(True)["y"] > 1e-3 and of_experts(experts(True))["y"] > 1e-3
    assert of_linear(True)["dx"] > 1e-3 and of_experts(experts(True))["dx"] > 1e-3


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_a_recomputed_layer_has_the_same_bits(kind):
    layer = linear(True, bias=False) if kind == "linear" else experts(True)
    x, ids, weights, dy = inputs()
    rest = () if kind == "linear" else (ids, weights)
    dy = drawn(T, 48, seed=6) if kind == "linear" else dy

    def grads() -> list[torch.Tensor]:
        taken = [x.grad, *(p.grad for p in layer.adapter.parameters())]
        x.grad = None
        layer.adapter.zero_grad()
        return taken

    layer(x, *rest).backward(dy)
    once = grads()
    saved = Saved()
    layer(x, *rest, saved.reuse)
    saved.second = True
    layer(x, *rest, saved.reuse).backward(dy)
    assert all(torch.equal(a, b) for a, b in zip(once, grads(), strict=True))


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_gradients_of_two_micro_batches_add_up_to_those_of_one(kind):
    layer = linear(True) if kind == "linear" else experts(True)
    x, ids, weights, dy = inputs()
    dy = drawn(T, 48, seed=6) if kind == "linear" else dy

    def grads(parts: int) -> list[torch.Tensor]:
        layer.adapter.zero_grad()
        cut = (each.detach().chunk(parts) for each in (x, ids, weights, dy))
        for own_x, own_ids, own_weights, own_dy in zip(*cut, strict=True):
            rest = () if kind == "linear" else (own_ids, own_weights)
            layer(own_x, *rest).backward(own_dy)
        return [parameter.grad.clone() for parameter in layer.adapter.parameters()]

    for one, two in zip(grads(1), grads(2), strict=True):
        assert far(two, one.double()) < TOLERANCE


@pytest.mark.parametrize("packed", [True, False])
def test_factors_that_are_not_finite_give_an_output_that_is_not(packed):
    layer = linear(packed)
    layer.adapter.B.data[3, 1] = torch.inf
    assert layer(drawn(T, 64)).isnan().any()


def test_nothing_expanded_is_saved_for_backward():
    layer, (x, ids, weights, _) = experts(True), inputs()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x, ids, weights)
        linear(True)(drawn(T, 64).requires_grad_())
    rows = (T * K, 2 * I)
    assert all(t.numel() <= max(rows[0] * rows[1], E * 2 * I * R * 2) for t in kept)
    assert not any(t.shape[-2:] in ((2 * I, D), (D, I), (48, 64)) for t in kept)
