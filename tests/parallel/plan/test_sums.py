"""The moment after backward at which processes sum their gradients: the plan's bytes against those that
train/optim.py and parallel/processes/collectives.py hold, counted on meta at true size by torch's own dispatch."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.adapters import lora as low_rank
from unfreeze.core.layout import RESIDENT
from unfreeze.parallel.plan import Work, measure_sizes, terms
from unfreeze.parallel.plan.counts import counts
from unfreeze.parallel.plan.fleet import fleet
from unfreeze.parallel.plan.places import bytes_by_place
from unfreeze.parallel.processes import collectives
from unfreeze.train.optim import AdamW

LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "head_dim": 128,
}


def held(live, patch, config, dtype, rank, batches):
    """(bytes counted while two processes sum their gradients, as planned); each has so many micro-batches."""
    for module in (low_rank.LowRank, low_rank.ExpertLowRank):
        patch.setattr(module, "reset", lambda *_, **__: None)
    patch.setattr(dist, "all_reduce", lambda *_, **__: None)
    model = models.build(models.shape(config), dtype=dtype, device="meta")
    lora = None if rank is None else LoraConfig(rank=rank)
    sizes = measure_sizes(model, lora, "cuda")
    if lora is not None:
        attach(model, lora, 0, device="meta")
    optimizer = AdamW(model)
    group = object.__new__(collectives.Processes)
    group.size = 2
    watch = live.Live([*model.parameters(), *model.buffers(), *optimizer.tensors().values()])
    with watch:
        for _ in range(batches):
            for parameter in optimizer.parameters.values():
                before = parameter.grad
                parameter.grad = torch.empty_like(parameter) if before is None else before
            optimizer.collect()
        watch.peak = watch.now  # of the moment itself
        optimizer.sum_gradients(group)
    work = Work(tokens=1, rank=rank, micro_batches=2 * batches, processes=2)
    return watch.peak, sum(terms._exchange(sizes, work).values())


CASES = [
    (LLAMA, torch.bfloat16, None, 1),
    (LLAMA, torch.bfloat16, None, 2),
    (LLAMA, torch.float32, None, 1),
    (LLAMA, torch.bfloat16, 16, 1),
    (QWEN3_MOE, torch.bfloat16, None, 1),
    (QWEN3_MOE, torch.bfloat16, 256, 2),
]


@pytest.mark.parametrize("bucket", [2**12, collectives.BUCKET])
@pytest.mark.parametrize("config, dtype, rank, batches", CASES)
def test_the_sums_take_what_the_plan_says(live, monkeypatch, config, dtype, rank, batches, bucket):
    """With buckets as they are, and so small that each matrix goes alone.

    The plan takes the largest tensor to be the last: of two layers of experts that is 9 % too much.
    """
    monkeypatch.setattr(collectives, "BUCKET", bucket)
    monkeypatch.setattr(terms, "BUCKET", bucket)
    counted, planned = held(live, monkeypatch, config, dtype, rank, batches)
    assert counted <= planned <= 1.1 * counted


def test_control_arm_without_the_gradients_that_came_the_plan_is_too_small(live, monkeypatch):
    """Half-precision gradients of experts are stacked, and there until their float32 sum has come back."""
    counted, _ = held(live, monkeypatch, QWEN3_MOE, torch.bfloat16, None, 1)
    model = models.from_config(QWEN3_MOE, torch.bfloat16)
    sizes, work = (
        replace(measure_sizes(model, None, "cuda"), largest=0),
        Work(tokens=1, micro_batches=2, processes=2),
    )
    assert sum(terms._exchange(sizes, work).values()) < counted


@pytest.mark.parametrize("dtype, before", [(torch.bfloat16, 2), (torch.float32, 4)])
def test_every_weight_on_several_gpus_has_float32_sums(dtype, before):
    """Of 8 GPUs each holds 4 bytes a weight where one alone holds what backward gave."""
    model = models.from_config(LLAMA, dtype)
    sizes, counted = measure_sizes(model, None, "cuda"), counts(model)
    # few tokens, so that gradients are the worst moment
    work = Work(tokens=16, loss_rows=16, loss_bytes=2, longest=16)
    one, eight = (
        bytes_by_place(sizes, counted, work, fleet(words), RESIDENT) for words in ("1xH200", "8xH200")
    )
    assert one.device["gradients"] <= before * sizes.elements
    assert eight.device["gradients"] == 4 * sizes.elements
    assert eight.device["gradients on their way"] >= 2 * sizes.largest * (dtype == torch.bfloat16)
    assert "gradients on their way" not in one.device
