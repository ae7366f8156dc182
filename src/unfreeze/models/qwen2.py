"""Qwen2 and Qwen2.5: a Llama block with biases on q, k and v. Source: arXiv:2407.10671."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = llama.RULES
ignored = llama.ignored
WINDOW = names("sliding_window max_window_layers")
"""Without effect while use_sliding_window is false, the only value that is implemented."""
FIELDS = Fields(
    absent={**llama.ABSENT, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    read=names("head_dim"),
    null=names("num_key_value_heads"),
    silent=WINDOW,
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    return replace(llama.shape(config), family="qwen2")


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    mlp = make.mlp(f"model.layers.{index}.mlp", shape.hidden_size, shape.intermediate_size)
    return llama.block(
        shape, llama.attention(shape, index, make, qkv_bias=True, output_bias=False), mlp, make
    )
