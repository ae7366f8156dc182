"""config.json of MiMo-V2-Flash: the release's own words, and transformers' lists and rotary tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import llama
from unfreeze.models.allowed import Config, Fields, names
from unfreeze.models.blocks.rope import rope_from_config, rotary_width
from unfreeze.models.layer_types import FULL, SLIDING, dense_layers, layer_types, per_kind, require_tables
from unfreeze.models.shape import MoEShape, Shape, common

FULL_THETA, SLIDING_THETA, PARTIAL = 5e6, 1e4, 0.334  # defaults of the rotary tables
ROTARY = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": PARTIAL}
    for kind, theta in ((FULL, FULL_THETA), (SLIDING, SLIDING_THETA))
}
"""Default of rope_parameters."""


def _kinds(config: Config) -> tuple[str, ...]:
    return layer_types(config, lambda index: SLIDING if index and (index + 1) % 6 else FULL)


def _theta(config: Config, kind: str) -> object:
    table = config.get("rope_parameters", ROTARY).get(kind)
    return table.get("rope_theta") if isinstance(table, Mapping) else ROTARY[kind]["rope_theta"]


FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "attention_value_scale": 0.707,
        "sliding_window": 129,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    read=names("layer_types mlp_layer_types sliding_window_size partial_rotary_factor"),
    null=names("attention_value_scale"),
    only={
        "scoring_func": lambda config: "sigmoid",
        "topk_method": lambda config: "noaux_tc",
        "n_shared_experts": lambda config: 0,
        # the release's own words; transformers reads the tables and lists, and the defaults above
        "rope_theta": lambda config: _theta(config, FULL),
        "swa_rope_theta": lambda config: _theta(config, SLIDING),
        "rope_scaling": lambda config: {},
        "partial_rotary_factor": lambda config: PARTIAL,
        "layernorm_epsilon": lambda config: config["rms_norm_eps"],
        "hybrid_layer_pattern": lambda config: [int(kind == SLIDING) for kind in _kinds(config)],
        "moe_layer_freq": lambda config: [int(i not in _dense(config)) for i in range(len(_kinds(config)))],
        "swa_num_attention_heads": lambda config: config.get("num_attention_heads"),
        "swa_num_key_value_heads": lambda config: 2 * config["num_key_value_heads"],
        "swa_head_dim": lambda config: config["head_dim"],
        "swa_v_head_dim": lambda config: config["v_head_dim"],
        "add_full_attention_sink_bias": lambda config: False,
        "add_swa_attention_sink_bias": lambda config: True,
        "num_local_experts": lambda config: config["n_routed_experts"],
    },
    never_null=names("norm_topk_prob"),
    silent=names("auto_map attention_chunk_size hybrid_block_size num_nextn_predict_layers"),
    per_kind=(FULL, SLIDING),
)


def _dense(config: Config) -> frozenset[int]:
    return dense_layers(config, 1)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: num_key_value_heads is that of full layers; a window counts the query itself.

    Raises CheckpointError for heads that sliding layers' keys don't divide.
    """
    if "sliding_window_size" in config:  # the keys before the query
        config = {**config, "sliding_window": int(config["sliding_window_size"]) + 1}
    kinds, width = _kinds(config), int(config["head_dim"])
    heads, groups = int(config.get("num_attention_heads") or 0), 2 * int(config["num_key_value_heads"])
    if SLIDING in kinds and heads % groups:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads:,} is not a multiple of the {groups:,} key heads of"
            " sliding layers, 2 x num_key_value_heads",
            next="get config.json from the model's publisher again",
        )
    tables = {"rope_parameters": ROTARY, **config}
    require_tables(tables["rope_parameters"], "mimo_v2_flash")
    rope, sliding = (
        rope_from_config(table, rotary_width(table, width, PARTIAL))
        for table in per_kind(tables, full=FULL_THETA, sliding=SLIDING_THETA)
    )
    moe = MoEShape(
        num_experts=int(config["n_routed_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        num_shared_experts=0,
        dense_layers=_dense(config),
    )
    sizes = common(config, family="mimo_v2_flash", rope=rope, head_dim=width, moe=moe)
    return replace(sizes, layer_types=kinds, ropes={SLIDING: sliding})
