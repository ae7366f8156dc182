"""GLM-4.5 and 4.6: grouped-query attention with partial rotation, DeepSeek-V3's routing and shared experts.

Source: arXiv:2508.06471.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unfreeze.models import deepseek_v3, llama, qwen3
from unfreeze.models.allowed import Fields, names
from unfreeze.models.blocks.rope import rope_from_config, rotary_width
from unfreeze.models.configs.deepseek_v3 import OTHER_NAMES, moe_shape
from unfreeze.models.shape import Shape, common, require

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = deepseek_v3.RULES
ignored = deepseek_v3.ignored
PARTIAL = 0.5  # default of partial_rotary_factor
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
    },
    read=names("head_dim partial_rotary_factor n_routed_experts moe_intermediate_size"),
    only=OTHER_NAMES | {"scoring_func": lambda config: "sigmoid"},
    never_null=names("norm_topk_prob use_qk_norm"),
    neutral=qwen3.QK_NORM,
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    head_dim = int(
        config.get("head_dim") or require(config, "hidden_size") // require(config, "num_attention_heads")
    )
    rope = rope_from_config(config, rotary_width(config, head_dim, PARTIAL))
    moe = moe_shape(config)
    return common(config, family="glm4_moe", rope=rope, head_dim=head_dim, moe=moe)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`: attention_bias sets biases on q, k and v; o_proj has none."""
    attention = llama.attention(
        shape,
        index,
        make,
        qkv_bias=bool(shape.config["attention_bias"]),
        output_bias=False,
        qk_norm=bool(shape.config["use_qk_norm"]),
        pairs="leading halves",
    )
    return llama.block(shape, attention, deepseek_v3.mlp(shape, index, make, deepseek_v3.router), make)
