"""The count of a step's operations against torch's own counter, and the measured GEMM rate."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.harness import gemm, shapes
from benchmarks.harness.job import batch_of, model_flops, tokens_of
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.objectives.cross_entropy import cross_entropy

DOCUMENTS, LENGTH = 6, 8


class Counter(TorchDispatchMode):
    """torch's formulas, op by op. (Its own FlopCounterMode tracks modules too, which an autograd.grad within
    a backward doesn't allow.)"""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        count = flop_registry.get(function._overloadpacket)
        self.total += count(*args, **(kwargs or {}), out_val=out) if count else 0
        return out


def counted(model):
    """FLOP of forward and backward as torch counts them, in float64, where every op is plain torch."""
    batch = batch_of(tokens_of(torch.Generator().manual_seed(0), DOCUMENTS, LENGTH, model.shape.vocab_size))
    with Counter() as counter:
        cross_entropy(model.hidden(batch, models.plain), model.lm_head, batch).sum.backward()
    return counter.total


def built(config):
    # without a codec: experts are dense
    model = models.build(models.shape(config), dtype=torch.float64, device="cpu")
    models.initialize(model, seed=0)
    return model


def test_full_training_is_what_torch_counts(tiny):
    """Within 6 %: the head skips each document's last position (1 of 8), and torch counts attention without
    the causal half."""
    sizes = shapes.QWEN2_05B | {"num_hidden_layers": 4, "intermediate_size": 256, "vocab_size": 128}
    model = built(shapes.qwen("qwen2", sizes))
    assert counted(model) == pytest.approx(model_flops(model, DOCUMENTS, LENGTH), rel=0.06)


def lora_moe(**sizes):
    model = built(shapes.kimi(num_hidden_layers=6, **sizes))
    attach(model, LoraConfig(rank=4, targets=("attention", "experts")), seed=0)
    return model


def test_lora_on_experts_is_what_torch_counts(tiny):
    """Within 10 %: the router runs in float32 and has no weight gradient, nothing goes back beyond the first
    layer's adapters, and the above."""
    model = lora_moe()
    assert counted(model) == pytest.approx(model_flops(model, DOCUMENTS, LENGTH), rel=0.10)


def test_adapters_of_experts_a_token_is_not_given_count_for_nothing(tiny):
    few, many = (model_flops(lora_moe(n_routed_experts=n), 1, LENGTH) for n in (8, 16))
    routers = 5 * 8 * tiny["hidden_size"] * 4 * LENGTH  # eight more rows in each of the five routers
    assert many - few == pytest.approx(routers)


def test_the_gemms_of_an_expert_are_its_forward_and_input_gradient():
    assert gemm.flops(gemm.expert_gemms(128, 1024, 512)) == 128 * 2 * (3 * 1024 * 512) * 2


def test_the_rate_is_the_faster_of_the_two_ways():
    found = gemm.rate_here([(16, 32, 32, True), (16, 32, 32, False)], torch.float32, seconds=0.02)()
    assert found["gflops_per_second"] == max(found["together"], found["each"]) > 0


def test_a_batch_is_of_all_experts(monkeypatch):
    """4 experts in 1 ms: four times the FLOP of one."""
    monkeypatch.setattr(
        gemm, "timed", lambda work, device, repeats: type("Timing", (), {"ms": work() and 1.0})
    )
    gemms = gemm.expert_gemms(16, 64, 32)
    found = gemm.batched_rate(gemms, 4, "cpu")()
    assert found["batched"] == pytest.approx(4 * gemm.flops(gemms) / 1e6)
