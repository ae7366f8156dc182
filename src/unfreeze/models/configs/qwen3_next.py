"""config.json of Qwen3-Next: `hybrid` reads what Qwen3.5 has too, all but the experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze.models import llama, qwen3, qwen3_moe
from unfreeze.models.allowed import Fields, names
from unfreeze.models.blocks.rope import rope_from_config, rotary_width
from unfreeze.models.fields import divides
from unfreeze.models.layer_types import FULL, LINEAR, layer_types
from unfreeze.models.shape import Shape

SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
PARTIAL = 0.25  # default of partial_rotary_factor
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        **SIZES,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    read=names("layer_types full_attention_interval partial_rotary_factor"),
    neutral=qwen3.QK_NORM,
)


def hybrid(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json, without experts. Every full_attention_interval-th layer has attention."""
    every = int(config.get("full_attention_interval", 4))
    kinds = layer_types(config, lambda index: LINEAR if (index + 1) % every else FULL, (FULL, LINEAR))
    divides(config, "linear_num_key_heads", "linear_num_value_heads")
    base = llama.shape(config)
    rope = rope_from_config(config, rotary_width(config, base.head_dim, PARTIAL))
    return replace(base, rope=rope, layer_types=kinds)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json; layers are sparse as in Qwen3-MoE."""
    moe = qwen3_moe.moe_shape(config, num_shared_experts=1)
    return replace(hybrid(config), family="qwen3_next", moe=moe)
