"""config.json of LFM2: the layers with attention, and the width of its MLPs. LFM2-MoE shares `sized`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.fields import NEXT
from unfreeze.models.layer_types import FULL, layer_types
from unfreeze.models.shape import Shape, require

CONV = "conv"
ABSENT: Mapping[str, Any] = {
    "norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128000,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "conv_bias": False,
    "conv_L_cache": 3,
}
FIELDS = Fields(
    absent={
        **ABSENT,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    read=names("layer_types full_attn_idxs block_ff_dim tie_embedding"),
    null=names("block_ffn_dim_multiplier"),
    only={
        "block_dim": lambda config: config.get("hidden_size"),
        "conv_dim": lambda config: config.get("hidden_size"),
        "conv_dim_out": lambda config: config.get("hidden_size"),
        "num_heads": lambda config: config.get("num_attention_heads"),
        "block_norm_eps": lambda config: config["norm_eps"],
        "block_use_swiglu": lambda config: True,
        "use_pos_enc": lambda config: True,
    },
    silent=names("block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init"),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: layers of full_attn_idxs have attention, all if it is absent.

    Raises CheckpointError for full_attn_idxs and layer_types that differ.
    """
    layers, indices = int(require(config, "num_hidden_layers")), config.get("full_attn_idxs")
    full = range(layers) if indices is None else indices
    if max(full, default=0) >= layers:
        raise CheckpointError(
            f"config.json: full_attn_idxs holds {max(full):,}, and layers are numbered 0 to {layers - 1:,}",
            next=NEXT,
        )
    sizes = sized({**config, "intermediate_size": mlp_width(config)}, full)
    if indices is not None and {i for i, kind in enumerate(sizes.layer_types) if kind == FULL} != {*full}:
        raise CheckpointError("config.json: full_attn_idxs and layer_types differ", next=NEXT)
    return sizes


def sized(config: Mapping[str, Any], full: Collection[int]) -> Shape:
    """Sizes from config.json, without experts; `full`: the layers with attention if layer_types is absent."""
    config = {
        **config,
        "rms_norm_eps": config["norm_eps"],
        "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"]),
    }
    kinds = layer_types(config, lambda index: FULL if index in full else CONV, (FULL, CONV))
    return replace(llama.shape(config), family="lfm2", layer_types=kinds)


def mlp_width(config: Mapping[str, Any]) -> int:
    """Width of the MLPs: block_ff_dim or intermediate_size; adjusted, 2/3 of it, rounded up to a multiple.

    As transformers' Lfm2MLP: floor(multiplier · floor(2/3 · width)), then up to block_multiple_of.
    """
    width = int(config.get("block_ff_dim") or require(config, "intermediate_size"))
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width, factor, multiple = (
        int(2 * width / 3),
        config["block_ffn_dim_multiplier"],
        config["block_multiple_of"],
    )
    return width if factor is None else -(-int(factor * width) // multiple) * multiple
