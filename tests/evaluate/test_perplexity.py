"""Held-out loss is a sum over tokens: the same for batches of 1, 4 and 16 documents (docs/why/trust.md N8), equal
to transformers, and it disturbs nothing."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from unfreeze import models
from unfreeze.core.errors import DataError
from unfreeze.data import Example, pack
from unfreeze.evaluate.perplexity import heldout
from unfreeze.objectives.cross_entropy import cross_entropy

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LENGTHS = [2, 90, 3, 5, 2, 60, 7, 2, 40, 3, 2, 100, 4, 6, 2, 9]


@pytest.fixture(scope="module")
def pair() -> tuple[models.Decoder, transformers.LlamaForCausalLM]:
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, initializer_range=0.3)).eval()
    ours = models.build(models.shape(theirs.config.to_dict()), dtype=torch.float32, device="cpu")
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.fixture(scope="module")
def documents() -> list[Example]:
    generator = torch.Generator().manual_seed(1)
    return [
        Example(torch.randint(0, 61, (n,), generator=generator).tolist(), [0.0] + [1.0] * (n - 1))
        for n in LENGTHS
    ]


def batched(documents: list[Example], size: int) -> list:
    return [pack(documents[i : i + size]) for i in range(0, len(documents), size)]


def test_equal_for_batches_of_1_4_and_16_and_to_transformers(pair, documents):
    ours, theirs = pair
    total = 0.0
    with torch.no_grad():
        for document in documents:
            ids = torch.tensor([document.tokens])
            total += float(theirs(ids, labels=ids).loss.double()) * (document.num_tokens - 1)
    expected = total / sum(n - 1 for n in LENGTHS)
    for size in (1, 4, 16):
        found = heldout(ours, batched(documents, size), bytes_total=1234)
        assert found.loss == pytest.approx(expected, rel=1e-6)
        assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
        assert found.bits_per_byte == pytest.approx(expected * found.tokens / math.log(2) / 1234, rel=1e-6)
        assert found.tokens == sum(n - 1 for n in LENGTHS)
    values = [heldout(ours, batched(documents, size)) for size in (1, 4, 16)]
    assert (
        max(v.perplexity for v in values) / min(v.perplexity for v in values) - 1 <= 1e-6
        and values[0].bits_per_byte is None
    )


def test_control_arm_a_mean_of_batch_means_depends_on_the_batch_size(pair, documents):
    def mean_of_means(size: int) -> float:
        with torch.no_grad():
            losses = [cross_entropy(pair[0].hidden(b), pair[0].lm_head, b) for b in batched(documents, size)]
        return sum(float(loss.sum) / loss.count for loss in losses) / len(losses)

    assert abs(mean_of_means(1) / mean_of_means(16) - 1) > 0.01


def test_nothing_supervised_is_refused_and_counts_of_experts_are_put_back(pair):
    with pytest.raises(DataError, match="0 tokens of the held-out batches are supervised"):
        heldout(pair[0], [pack([Example([1, 2, 3], [0.0, 0.0, 0.0])])])
    config = {
        **SMALL,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
    }
    moe = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(moe, 0)
    before, random = (
        {layer: m.counts_E.fill_(7).clone() for layer, m in moe.moe_layers().items()},
        torch.get_rng_state(),
    )
    heldout(moe, [pack([Example([1, 2, 3], [0.0, 1.0, 1.0])])])
    assert all(
        torch.equal(m.counts_E, before[layer]) for layer, m in moe.moe_layers().items()
    ) and torch.equal(torch.get_rng_state(), random)
    with torch.no_grad():  # control arm: a bare forward pass does count
        moe.hidden(pack([Example([1, 2, 3], [0.0, 1.0, 1.0])]))
    assert not torch.equal(moe.moe_layers()[0].counts_E, before[0])
