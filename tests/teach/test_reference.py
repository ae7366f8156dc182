"""The model as it began, as the reference of a policy: log p of each sampled token."""

from __future__ import annotations

import pytest
import torch

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, sites
from unfreeze.core.batch import Batch
from unfreeze.data import Example, pack
from unfreeze.kernels.linear_cross_entropy import Words
from unfreeze.models import Decoder
from unfreeze.objectives.log_p import log_probabilities, token_log_p
from unfreeze.teach.reference import AsBegun

LLAMA = {
    "model_type": "llama",
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
WORDS = Words(80, 0.7)


def measure(hidden_TD, lm_head, batch: Batch) -> torch.Tensor:
    return token_log_p(hidden_TD, lm_head, batch, words=WORDS)


def batch_of() -> Batch:
    torch.manual_seed(0)
    documents = [torch.randint(0, 80, (length,)).tolist() for length in (9, 5)]
    return pack([Example(tokens, [0.0, *[1.0] * (len(tokens) - 1)]) for tokens in documents])


def move(model: Decoder) -> None:
    """As after some training."""
    for site in sites(model):
        for parameter in site.adapter.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["base", "adapters", "copy"])
def test_a_reference_gives_each_tokens_log_p_of_the_model_as_it_began(kind):
    model, batch = models.build(models.shape(LLAMA), dtype=torch.float32, device="cpu"), batch_of()
    models.initialize(model, 0)
    attach(model, LoraConfig(rank=2, targets=("attention",)), 0)
    if kind != "base":  # goes on from other adapters
        move(model)
    with torch.no_grad():
        began = measure(model.hidden(batch), model.lm_head, batch)
        whole = log_probabilities(model.hidden(batch), model.lm_head, batch)
    kept = []
    for chosen in (measure, None):
        AsBegun(kind, kept.append, measure=chosen).objective(model, torch.device("cpu"), "float32")
    move(model)
    with torch.no_grad():
        now = measure(model.hidden(batch), model.lm_head, batch)
    assert (now - began).abs().max() > 1e-2
    torch.testing.assert_close(kept[0](batch), began, rtol=0, atol=1e-6)
    torch.testing.assert_close(kept[1](batch), whole, rtol=0, atol=1e-5)
