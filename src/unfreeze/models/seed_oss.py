"""Seed-OSS: a Llama block with biases on q, k and v, and a separate field for o's bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama
from unfreeze.models.allowed import Fields
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = llama.RULES
ignored = llama.ignored
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    null=frozenset({"num_key_value_heads", "head_dim"}),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    return replace(llama.shape(config), family="seed_oss")


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    config = shape.config
    mlp = make.mlp(
        f"model.layers.{index}.mlp", shape.hidden_size, shape.intermediate_size, bias=bool(config["mlp_bias"])
    )
    attention = llama.attention(
        shape,
        index,
        make,
        qkv_bias=bool(config["attention_bias"]),
        output_bias=bool(config["attention_out_bias"]),
    )
    return llama.block(shape, attention, mlp, make)
