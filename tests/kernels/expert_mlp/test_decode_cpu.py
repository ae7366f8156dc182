"""The expert MLP for a handful of tokens, from INT4 codes, against the float64 reference; when it is taken,
and when it is not."""

import pytest
import torch

from unfreeze.kernels.expert_mlp import ExpertFactors, decode_cpu, expert_mlp, reference_expert_mlp
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

E, D, I, K = 9, 192, 64, 3


def made(T, dtype, lora, seed=0, group=32):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=g)

    packed = [
        Packed(Int4(group), Int4(group).quantize(randn(*shape) / shape[-1] ** 0.5))
        for shape in ((E, 2 * I, D), (E, D, I))
    ]
    factors = ExpertFactors()
    if lora == "both":
        factors = ExpertFactors(
            randn(E, 8, D), randn(E, 2 * I, 4) * 0.1, randn(E, 3, I), randn(E, D, 3) * 0.1, 0.5, 2.0
        )
    if lora == "down":
        factors = ExpertFactors(down_A=randn(E, 3, I), down_B=randn(E, D, 3) * 0.1, down_scale=0.7)
    ids = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
    return randn(T, D).to(dtype), ids, torch.rand(T, K, generator=g), *packed, factors


def exact(x, ids, weights, gate_up, down, factors):
    double = {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in vars(factors).items()
    }
    return reference_expert_mlp(
        x.double(),
        ids,
        weights.double(),
        gate_up.dequantize().double(),
        down.dequantize().double(),
        ExpertFactors(**double),
    )


@pytest.fixture
def taken(monkeypatch):
    """How often the path for a few tokens was gone."""
    calls, decode = [], decode_cpu.decode
    monkeypatch.setattr(decode_cpu, "decode", lambda *a: calls.append(1) or decode(*a))
    return calls


# bf16: the result is rounded once
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("lora", ["none", "both", "down"])
@pytest.mark.parametrize("T", [1, 5])
def test_equals_float64(T, lora, dtype, tolerance, taken):
    args = made(T, dtype, lora)
    with torch.no_grad():
        y = expert_mlp(*args, impl="fused")
    want = exact(*args)
    assert taken == [1] and y.dtype == dtype
    assert (y.double() - want).norm() <= tolerance * want.norm()


def test_weights_are_the_rounded_ones_of_the_checkpoint():
    """(code - 8) · scale is rounded to bf16 when dequantized; without that rounding decoding would use other
    weights than training does."""
    args = made(1, torch.float32, "none")
    with torch.no_grad():
        y = expert_mlp(*args, impl="fused")
    # control arm: unrounded weights are off by far more than the tolerance above
    unrounded = []
    for packed in args[3:5]:
        codes = packed.parts["weight_packed"].view(torch.uint8)
        values = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).double() - 8
        unrounded.append(
            values * packed.parts["weight_scale"].double().repeat_interleave(packed.codec.group_size, -1)
        )
    other = reference_expert_mlp(args[0].double(), args[1], args[2].double(), *unrounded, ExpertFactors())
    assert (y.double() - other).norm() > 1e-4 * other.norm()


def test_many_rows_per_expert_gradients_and_dense_weights_go_the_other_way(taken):
    x, ids, weights, gate_up, down, factors = made(30, torch.float32, "none")
    with torch.no_grad():
        expert_mlp(x, ids, weights, gate_up, down, factors, impl="fused")  # 90 rows for 9 experts
        few = made(1, torch.float32, "none")
        expert_mlp(*few[:3], few[3].dequantize().float(), few[4].dequantize().float(), None, impl="fused")
    expert_mlp(few[0].requires_grad_(), *few[1:], impl="fused").sum().backward()
    assert taken == []


def test_an_id_that_is_no_expert_is_refused():
    x, _, weights, gate_up, down, factors = made(1, torch.float32, "none")
    with torch.no_grad(), pytest.raises(IndexError, match="expert id 9 outside"):
        expert_mlp(x, torch.tensor([[0, 1, 9]]), weights, gate_up, down, factors, impl="fused")
