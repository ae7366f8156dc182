"""Small models of random weights: grouped-query attention with and without norms, with a sliding window, with
longrope; and latent attention with experts.

exact.py beside the tests, and the cases of every family in tests/models, can be imported by name.
"""

import sys
from pathlib import Path

import pytest
import torch

from unfreeze import models

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "models")]

SMALL = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 320,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.25,
}
MLA = {
    "model_type": "kimi_k2",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.0,
}
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
KINDS = {
    "gqa": {
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "gqa-qk-norm": {
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "mla-moe": MLA,
    "mla-yarn": MLA | {"v_head_dim": 12, "rope_scaling": YARN, "rope_theta": 50000.0},
}
KINDS["window"] = KINDS["gqa-qk-norm"] | {"model_type": "mistral", "sliding_window": 9}
KINDS["longrope"] = KINDS["gqa"] | {
    "model_type": "phi3",
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
}
KINDS["mla-yarn-no-q-latent"] = KINDS["mla-yarn"] | {"q_lora_rank": None}


@pytest.fixture(scope="session")
def build():
    """build(kind, dtype, **changes) -> a model that only answers."""

    def built(kind, dtype=torch.float32, **changes):
        shape = models.shape({**SMALL, **KINDS[kind], **changes})
        model = models.build(shape, dtype=dtype, device="cpu")
        models.initialize(model, seed=1)
        return model.eval().requires_grad_(False)

    return built
