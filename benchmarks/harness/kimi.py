"""config.json of a small model in Kimi-K2-Thinking's on-disk format: what moe, load and decode measure on.

As published: hidden 1024, 8 layers (the first dense), 128 experts of width 512, top-8, one shared expert,
vocabulary 8192; 0.9 GB with INT4 experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import unfreeze
from unfreeze.checkpoint.manifest import read_json

TINY_K2 = Path(unfreeze.__file__).parent / "assets" / "tiny-k2"
SIZES: dict[str, int] = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "intermediate_size": 2560,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 8192,
}
CHECKED = {"num_hidden_layers": 2, "n_routed_experts": 16}
"""What is smaller in the checkpoint that the float64 comparison runs on: in float64 all 128 experts of 8
layers would be 11 GB."""


def config(**sizes: int) -> dict[str, Any]:
    """config.json of the checkpoint: tiny-k2's, with the published positions; `sizes` replace those of SIZES.

    model_type is what transformers, one of the sides, calls the architecture.
    """
    ours = read_json(TINY_K2 / "config.json")
    return {
        **ours,
        **SIZES,
        **sizes,
        "model_type": "deepseek_v3",
        "max_position_embeddings": 262144,
        "rope_scaling": ours["rope_scaling"] | {"factor": 64.0, "original_max_position_embeddings": 4096},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
