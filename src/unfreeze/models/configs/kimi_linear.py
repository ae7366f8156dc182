"""config.json of Kimi Linear: sizes under two names each, and layers listed in linear_attn_config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models.allowed import Fields, names
from unfreeze.models.configs import deepseek_v3
from unfreeze.models.fields import NEXT, Whole, shown
from unfreeze.models.layer_types import FULL, LINEAR, layer_types
from unfreeze.models.shape import Shape, require

SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Sizes in linear_attn_config -> transformers' names for them outside."""
LISTS = ("kda_layers", "full_attn_layers")
OTHER_NAMES: dict[str, tuple[str, object]] = {
    "max_position_embeddings": ("model_max_length", 1048576),
    "norm_topk_prob": ("moe_renormalize", True),
    "n_group": ("num_expert_group", 1),
    "num_experts_per_tok": ("num_experts_per_token", 8),
    "n_shared_experts": ("num_shared_experts", 1),
    "num_local_experts": ("num_experts", 256),
}
"""DeepSeek-V3's name -> (Kimi Linear's, its default). A config with both must have the same value in both."""


def _same(name: str, own: str) -> Callable[[Mapping[str, Any]], object]:
    return lambda config: config.get(own, config[name])


FIELDS = Fields(
    absent={
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1024,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
    read=names("linear_attn_config layer_types mlp_layer_types first_k_dense_replace")
    | {own for own, _ in OTHER_NAMES.values()},
    only={
        "mla_use_nope": lambda config: True,
        "moe_router_activation_func": lambda config: "sigmoid",
        "topk_method": lambda config: "noaux_tc",
        "moe_layer_freq": lambda config: 1,
        **{name: deepseek_v3.MLA_SIZES[name] for name in ("num_key_value_heads", "qk_head_dim")},
        **{name: _same(name, own) for name, (own, _) in OTHER_NAMES.items()},
    },
    silent=names("auto_map use_grouped_topk head_dim"),  # head_dim is no size of its layers
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json; those in linear_attn_config stand above those outside, as in transformers.

    Raises CheckpointError for a linear_attn_config that contradicts itself or the fields beside it.
    """
    table = _linear(config)
    config = {
        **{name: value for name, value in config.items() if not name.startswith("rope_")},  # nothing rotates
        **{name: config.get(own, config.get(name, usual)) for name, (own, usual) in OTHER_NAMES.items()},
        **{own: table[name] for name, own in SIZES.items() if name in table},
    }
    full = table.get("full_attn_layers", range(5, config["num_hidden_layers"] + 1, 4))
    kinds = layer_types(config, lambda index: FULL if index + 1 in full else LINEAR, (FULL, LINEAR))
    if LISTS[1] in table and {index + 1 for index, kind in enumerate(kinds) if kind == FULL} != {*full}:
        raise CheckpointError("config.json: layer_types and linear_attn_config differ", next=NEXT)
    dense = int(config.get("first_k_dense_replace", 1))
    mlps = layer_types(
        config, lambda i: "dense" if i < dense else "sparse", ("dense", "sparse"), "mlp_layer_types"
    )
    sizes = deepseek_v3.shape({**config, "first_k_dense_replace": 0, "rope_interleave": True})
    assert sizes.moe is not None
    moe = replace(sizes.moe, dense_layers=frozenset(i for i, kind in enumerate(mlps) if kind == "dense"))
    return replace(sizes, family="kimi_linear", layer_types=kinds, moe=moe)


def _linear(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """linear_attn_config, checked: each layer is in one of its two lists, which count from 1."""
    table, layers = config.get("linear_attn_config") or {}, int(require(config, "num_hidden_layers"))
    for name, value in table.items():
        good = isinstance(value, list) if name in LISTS else name in SIZES and Whole(1, 2**20)(value)
        if not good:
            raise CheckpointError(
                f"config.json: linear_attn_config.{name} {shown(value)} is not built", next=NEXT
            )
    listed = [layer for name in LISTS for layer in table.get(name, ())]
    if listed and sorted(listed, key=str) != sorted(range(1, layers + 1), key=str):
        raise CheckpointError(
            f"config.json: {' and '.join(LISTS)} of linear_attn_config must hold each layer from 1 to"
            f" {layers:,} once",
            next=NEXT,
        )
    return table if listed else {name: value for name, value in table.items() if name not in LISTS}
