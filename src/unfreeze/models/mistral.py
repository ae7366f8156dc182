"""Mistral: a Llama block whose attention slides over a window if config.json has one.

A release without a window (7B v0.2 and later, Nemo) has sliding_window null. Source: arXiv:2310.06825.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama
from unfreeze.models.allowed import Config, Fields, names
from unfreeze.models.layer_types import everywhere, mask
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = llama.RULES
ignored = llama.ignored
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    read=names("head_dim"),
    null=names("num_key_value_heads sliding_window"),
    nested={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    # transformers' Mistral slides in every layer or in none, regardless of layer_types
    only={"layer_types": lambda config: list(everywhere(_without_types(config)))},
)


def _without_types(config: Config) -> Config:
    return {name: value for name, value in config.items() if name != "layer_types"}


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    return replace(llama.shape(config), family="mistral", layer_types=everywhere(config))


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    mlp = make.mlp(f"model.layers.{index}.mlp", shape.hidden_size, shape.intermediate_size)
    attention = llama.attention(
        shape, index, make, qkv_bias=False, output_bias=False, mask=mask(shape, index)
    )
    return llama.block(shape, attention, mlp, make)
