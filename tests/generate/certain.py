"""A small model, and adapters of which each says one token only: whoever answered is seen in every token.

Dimension 0 of the hidden state is large and positive everywhere, and an adapter of the head adds it to its token.
Its other layers change the answer's keys and values.
"""

from __future__ import annotations

import torch

from tests.adapters.drawn import drawn
from unfreeze import models

VOCAB = 96
FIELDS = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
RANKS = (1, 4, 16)


def model():
    built = models.build(models.shape(FIELDS), dtype=torch.float32, device="cpu")
    models.initialize(built, seed=1)
    built.eval().requires_grad_(False)
    built.model.embed_tokens.weight[:, 0] = 4.0
    built.lm_head.weight[:, 0] = 0.0
    built.lm_head.weight[0, 0] = 2.0  # without an adapter it says 0
    return built


def says(built, token):
    """The adapters that make a token certain."""
    adapters = drawn(built, RANKS[token % len(RANKS)], token, ("all-linear", "lm_head"))
    for name, adapter in adapters.items():
        adapter.requires_grad_(False)
        adapter.B.mul_(0.1)
        if name == "lm_head":
            adapter.A[0] = torch.eye(32)[0]
            adapter.B.zero_()[token, 0] = 50.0
    return adapters
