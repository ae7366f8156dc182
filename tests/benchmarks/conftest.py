"""Shapes that a benchmark runs through in seconds."""

import pytest

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 256,
}


@pytest.fixture(scope="session")
def tiny_sizes():
    return dict(TINY)
