"""config.json of Gemma 4's text model: the heads of its two kinds of layers, and their rotary tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import gemma2, llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.blocks.rope import rope_from_config
from unfreeze.models.fields import Whole, shown
from unfreeze.models.layer_types import FULL, SLIDING, layer_types, per_kind, require_tables
from unfreeze.models.shape import MoEShape, Shape, require

FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "hidden_activation": gemma2.GELU,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
    },
    read=names(
        "layer_types global_head_dim num_global_key_value_heads per_layer_config partial_rotary_factor"
        " num_experts top_k_experts moe_intermediate_size"
    ),
    null=names("final_logit_softcapping"),
    only={
        "hidden_activation": lambda config: gemma2.GELU,
        "use_bidirectional_attention": lambda config: "vision",  # text has no vision tokens
        "hidden_size_per_layer_input": lambda config: 0,
        "num_kv_shared_layers": lambda config: 0,
        "rope_scaling": lambda config: {},  # rope_parameters has a table per kind of layer
    },
    # of unimplemented parts, so without effect unless those are enabled
    silent=names("vocab_size_per_layer_input use_double_wide_mlp"),
    per_kind=(FULL, SLIDING),
)
ROTARY = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""Default of rope_parameters."""


def full_heads(config: Mapping[str, Any], kinds: tuple[str, ...]) -> tuple[int, int]:
    """(key heads, width) of full layers: from two fields, or from per_layer_config."""
    keys, width = int(config["num_key_value_heads"]), int(config.get("global_head_dim", 512))
    if config["attention_k_eq_v"] and config.get("num_global_key_value_heads"):
        keys = int(config["num_global_key_value_heads"])
    if "per_layer_config" not in config:
        return keys, width
    keys, width = int(config["num_key_value_heads"]), int(config["head_dim"])
    per_layer = config["per_layer_config"]
    if not per_layer:  # transformers writes it like this if no layer differs
        return keys, width
    full = {index for index, kind in enumerate(kinds) if kind == FULL}
    named = {int(index) for index in per_layer if str(index).isdecimal()}
    first = next(iter(per_layer.values()), {})
    known = {"head_dim": Whole(1, 2**16), "num_key_value_heads": Whole(1, 2**16)}
    alike = isinstance(first, Mapping) and all(table == first for table in per_layer.values())
    whole = alike and all(name in known and known[name](value) for name, value in first.items())
    if not whole or named != full or len(named) < len(per_layer):
        raise CheckpointError(
            f"config.json: per_layer_config {shown(config['per_layer_config'])} is not built for model_type"
            " 'gemma4_text'; built: head_dim and num_key_value_heads, alike in all full layers",
            next="open an issue with the model's name",
        )
    return first.get("num_key_value_heads", keys), first.get("head_dim", width)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: head_dim is that of sliding layers."""
    kinds = layer_types(config, lambda index: SLIDING if (index + 1) % 6 else FULL)
    kinds = (*kinds[:-1], FULL)  # as in transformers, regardless of layer_types' last entry
    _, width = full_heads(config, kinds)
    tables = config.get("rope_parameters", ROTARY)
    require_tables(tables, "gemma4_text")
    full, sliding = per_kind({**config, "rope_parameters": tables}, full=1e6, sliding=1e4)
    return replace(
        llama.shape(sliding),
        family="gemma4_text",
        layer_types=kinds,
        rope=rope_from_config(full, width),
        ropes={SLIDING: llama.shape(sliding).rope},
        softcap=config.get("final_logit_softcapping"),
        config=dict(config),
        moe=_moe_shape(config) if config["enable_moe_block"] else None,
    )


def _moe_shape(config: Mapping[str, Any]) -> MoEShape:
    """Sizes of the experts beside every layer's MLP."""
    return MoEShape(
        num_experts=int(require(config, "num_experts")),
        experts_per_token=int(require(config, "top_k_experts")),
        intermediate_size=int(require(config, "moe_intermediate_size")),
        num_shared_experts=0,
        dense_layers=frozenset(),
    )
