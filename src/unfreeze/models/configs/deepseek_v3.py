"""config.json of DeepSeek-V3 and Kimi-K2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unfreeze.models.allowed import Config, Fields, names
from unfreeze.models.blocks.rope import rope_from_config
from unfreeze.models.shape import MLAShape, MoEShape, Shape, common, require

OTHER_NAMES: dict[str, Callable[[Config], object]] = {
    "num_local_experts": lambda config: config.get("n_routed_experts", config["num_local_experts"]),
    "num_mtp_layers": lambda config: config.get("num_nextn_predict_layers", config["num_mtp_layers"]),
}
"""Second names of two sizes; if both names are present they must agree."""
MLA_SIZES: dict[str, Callable[[Config], object]] = {
    "moe_layer_freq": lambda config: 1,
    "mla_use_nope": lambda config: False,
    # latent attention has a key and a value per head; the others are second names of sizes, and must agree
    "num_key_value_heads": lambda config: config.get("num_attention_heads"),
    "head_dim": lambda config: config.get("qk_rope_head_dim"),
    "qk_head_dim": lambda config: (
        (config.get("qk_nope_head_dim") or 0) + (config.get("qk_rope_head_dim") or 0)
    ),
    **OTHER_NAMES,
}
FIELDS = Fields(
    absent={
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "num_key_value_heads": 128,
    },
    read=names(
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts moe_intermediate_size"
    ),
    null=names("q_lora_rank num_key_value_heads"),
    only={"scoring_func": lambda config: "sigmoid", "topk_method": lambda config: "noaux_tc", **MLA_SIZES},
    never_null=names("norm_topk_prob rope_interleave"),
    silent=names("auto_map"),  # the releases' own code, which computes what ../deepseek_v3.py does
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    mla = MLAShape(
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=int(require(config, "kv_lora_rank")),
        nope=int(require(config, "qk_nope_head_dim")),
        rope=int(require(config, "qk_rope_head_dim")),
        value=int(require(config, "v_head_dim")),
    )
    rope, moe = rope_from_config(config, mla.rope), moe_shape(config)
    return common(config, family="deepseek_v3", rope=rope, head_dim=mla.nope + mla.rope, mla=mla, moe=moe)


def moe_shape(config: Mapping[str, Any]) -> MoEShape:
    """Sizes of routed and shared experts; the first first_k_dense_replace layers have none."""
    return MoEShape(
        num_experts=int(
            config["num_local_experts"]
            if "num_local_experts" in config
            else require(config, "n_routed_experts")
        ),
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(require(config, "moe_intermediate_size")),
        num_shared_experts=int(config["n_shared_experts"]),
        dense_layers=frozenset(range(int(config["first_k_dense_replace"]))),
    )
