"""The count of a step's operations against torch's own counter, and the measured GEMM rate."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.cases import dense
from benchmarks.harness import kimi
from benchmarks.harness.flops import BatchedGemmRate, Gemm, GemmRate, expert_gemms, step_flops
from benchmarks.harness.job import batch_of, tokens_of
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


def counted(model, recompute):
    """FLOPs of forward and backward as torch counts them, in float64, where every op is plain torch."""
    batch = batch_of(tokens_of(torch.Generator().manual_seed(0), DOCUMENTS, LENGTH, model.shape.vocab_size))
    with Counter() as counter:
        loss = cross_entropy(model.hidden(batch, models.RECOMPUTE[recompute]), model.lm_head, batch)
        loss.sum.backward()
    return counter.total


def built(config):
    # without a codec: experts are dense
    model = models.build(models.shape(config), dtype=torch.float64, device="cpu")
    models.initialize(model, seed=0)
    return model


@pytest.fixture
def lora_moe(tiny_sizes):
    model = built(kimi.config(**(tiny_sizes | {"num_hidden_layers": 6})))
    attach(model, LoraConfig(rank=4, targets=("attention", "experts")), seed=0)
    return model


def test_full_training_is_what_torch_counts():
    """Within 6 %: the head skips each document's last position (1 of 8), and torch counts attention without
    the causal half."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
    }
    model = built(dense.qwen2(**sizes, vocab_size=128))
    work = step_flops(model, [LENGTH] * DOCUMENTS, "nothing")
    assert work.recomputed == 0 and counted(model, "nothing") == pytest.approx(work.model, rel=0.06)


def test_lora_on_experts_is_what_torch_counts(lora_moe):
    """Within 10 %: the router runs in float32 and has no weight gradient, nothing goes back beyond the first
    layer's adapters, and the above."""
    work = step_flops(lora_moe, [LENGTH] * DOCUMENTS, "nothing")
    assert counted(lora_moe, "nothing") == pytest.approx(work.model, rel=0.10)


def test_recomputing_all_layers_adds_what_is_stated(lora_moe):
    work = step_flops(lora_moe, [LENGTH] * DOCUMENTS, "layers")
    plain = counted(lora_moe, "nothing")
    assert counted(lora_moe, "layers") - plain == pytest.approx(work.recomputed, rel=0.10)
    assert 0 < step_flops(lora_moe, [LENGTH] * DOCUMENTS, "selective").recomputed < work.recomputed


def test_work_does_not_count_adapters_of_experts_a_token_is_not_given(lora_moe, tiny_sizes):
    more = built(kimi.config(**(tiny_sizes | {"num_hidden_layers": 6, "n_routed_experts": 16})))
    attach(more, LoraConfig(rank=4, targets=("attention", "experts")), seed=0)
    few, many = (step_flops(model, [LENGTH], "nothing").model for model in (lora_moe, more))
    routers = 5 * 8 * tiny_sizes["hidden_size"] * 4 * LENGTH  # eight more rows in each of the five routers
    assert many - few == pytest.approx(routers)


def test_the_gemms_of_an_expert_are_its_forward_and_input_gradient():
    assert sum(gemm.flops for gemm in expert_gemms(128, 1024, 512)) == 128 * 2 * (3 * 1024 * 512) * 2


def test_the_rate_is_the_faster_of_the_two_ways():
    found = GemmRate([Gemm(16, 32, 32), Gemm(16, 32, 32, False)], seconds=0.02).measure()
    assert found["gflops_per_second"] == max(found["together"], found["each"]) > 0


def test_a_batch_counts_the_gemms_of_all_experts():
    """The operands' own shapes say how much is multiplied: 2 · m · k · n for each of the experts."""
    rate = BatchedGemmRate(expert_gemms(16, 64, 32), experts=4, device="cpu")
    counted = sum(2 * a.numel() * b.shape[-1] for a, b, _ in rate._operands)
    assert counted == 4 * sum(gemm.flops for gemm in rate.gemms)
    found = rate.measure()
    assert found["gflops_per_second"] == found["batched"] > 0
    assert torch.equal(rate._operands[0][2], rate._operands[0][0] @ rate._operands[0][1])
