"""SmolLM3: a Llama block; every fourth layer has no rotation (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.layer_types import FULL, SLIDING, layer_types, mask
from unfreeze.models.shape import Shape, require

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = llama.RULES
ignored = llama.ignored
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
    read=names("head_dim sliding_window no_rope_layers layer_types"),
    null=names("num_key_value_heads"),
    silent=names("max_window_layers"),
)


def rotates(config: Mapping[str, Any]) -> list[bool]:
    """True for each layer that rotates: 1 in no_rope_layers, else all but every no_rope_layer_interval-th."""
    layers, every = int(require(config, "num_hidden_layers")), int(config["no_rope_layer_interval"])
    declared = config.get("no_rope_layers")
    usual = [(index + 1) % every for index in range(layers)]
    rotating = list(map(bool, usual if declared is None else declared))
    if len(rotating) < layers:
        raise CheckpointError(
            f"config.json: no_rope_layers has {len(rotating):,} entries, num_hidden_layers is {layers:,}",
            next="get config.json from the model's publisher again",
        )
    return rotating


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json.

    If use_sliding_window is true, the layers in layer_types slide, or those that don't rotate. Raises
    CheckpointError if it is false but layer_types names sliding layers: transformers' kernels then differ
    (its masks slide and its flash attention doesn't).
    """
    slides, rotating = config["use_sliding_window"] and config.get("sliding_window"), rotates(config)
    kinds = layer_types(config, lambda index: SLIDING if slides and not rotating[index] else FULL)
    if not config["use_sliding_window"] and SLIDING in kinds:
        raise CheckpointError(
            f"config.json: layer_types holds {SLIDING}, and use_sliding_window is false",
            next="write what the publisher's model does in both",
        )
    return replace(llama.shape(config), family="smollm3", layer_types=kinds)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    bias = bool(shape.config["attention_bias"])
    mlp = make.mlp(
        f"model.layers.{index}.mlp",
        shape.hidden_size,
        shape.intermediate_size,
        bias=bool(shape.config["mlp_bias"]),
    )
    attention = llama.attention(
        shape,
        index,
        make,
        qkv_bias=bias,
        output_bias=bias,
        rope="" if rotates(shape.config)[index] else None,
        mask=mask(shape, index),
    )
    return llama.block(shape, attention, mlp, make)
