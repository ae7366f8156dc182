"""Norms, activations and residual blocks beyond Llama's: gradients by torch's own, in float64, and recomputation."""

import pytest
import torch
import torch.nn.functional as F
from family_cases import difference

from unfreeze import models
from unfreeze.models.blocks.mlp import MLP
from unfreeze.models.blocks.nonlinearity import GATED_GELU, SQUARED_RELU
from unfreeze.models.blocks.norm import OffsetRMSNorm, PlainRMSNorm


@pytest.mark.parametrize(
    "part, formula",
    [
        (GATED_GELU, lambda gate, up: F.gelu(gate, approximate="tanh") * up),
        (SQUARED_RELU, lambda x: F.relu(x) ** 2),
    ],
    ids=["geglu", "relu2"],
)
def test_an_activation_and_its_backward(part, formula):
    torch.manual_seed(0)
    inputs = [
        torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
        for _ in range(formula.__code__.co_argcount)
    ]
    ours, theirs = part.apply(*inputs), formula(*inputs)
    torch.testing.assert_close(ours, theirs)
    dh = torch.randn(5, 7, dtype=torch.float64)
    for got, want in zip(
        torch.autograd.grad(ours, inputs, dh), torch.autograd.grad(theirs, inputs, dh), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemmas_norm_has_a_gain_of_one_plus_the_weight(dtype):
    torch.manual_seed(0)
    norm = OffsetRMSNorm(64, 1e-5, dtype=dtype, device="cpu")
    norm.reset()
    assert not norm.weight.any()
    with torch.no_grad():
        norm.weight.copy_(0.01 * torch.randn(64))
    x = torch.randn(9, 64).to(dtype).requires_grad_()
    y = norm(x)
    assert y.dtype == dtype
    got = torch.autograd.grad(y.double().sum(), (x, norm.weight))
    x64, w64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    y64 = (1 + w64) * x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-5)
    # bf16: a rounding behind the norm and one behind the gain, 2^-9 each
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-6
    for ours, theirs in [(y, y64), *zip(got, torch.autograd.grad(y64.sum(), (x64, w64)), strict=True)]:
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
    if dtype == torch.bfloat16:  # control: a gain rounded to bf16 keeps one digit of such weights
        assert ((1 + norm.weight).double() - 1 - w64).norm() > 0.1 * w64.norm()


def test_a_norm_without_a_weight_has_none():
    norm = PlainRMSNorm(8, 1e-6, dtype=torch.float32, device="cpu")
    assert not list(norm.parameters())
    torch.testing.assert_close(norm(torch.full((1, 8), 3.0)), torch.ones(1, 8))


RECOMPUTED = [
    *("granite", "olmo2", "nanochat", "smollm3-window"),
    *("granite4", "nemotron-h", "nemotron-h-latent-groups-limits"),
]


@pytest.mark.parametrize("name", RECOMPUTED)
@pytest.mark.parametrize("recompute", [models.keep_inputs, models.elementwise, models.selective])
def test_other_layers_recompute_to_the_same_gradients(name, recompute):
    logits, gradients = difference(name, recompute)
    assert logits <= 1e-4 and gradients <= 1e-4


def test_control_a_norm_that_reads_a_product_needs_it_recomputed(monkeypatch):
    """down_proj's output is zeros at a second visit where nobody reads it: a norm behind it does."""
    monkeypatch.setattr(MLP, "read", MLP.forward)
    assert difference("olmo2", models.keep_inputs)[1] > 1e-2
