"""Qwen3: a Llama block with an RMSNorm per head on q and k, no biases. Source: arXiv:2505.09388."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama, qwen2
from unfreeze.models.allowed import Fields, names
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.attention import Attention
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = llama.RULES
ignored = llama.ignored
QK_NORM = {"use_qk_norm": True, "qk_norm": True}
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "attention_bias": False,
    },
    null=names("num_key_value_heads"),
    silent=qwen2.WINDOW,
    neutral=QK_NORM,
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    return replace(llama.shape(config), family="qwen3")


def attention(shape: Shape, index: int, make: Factory) -> Attention:
    """GQA with q_norm and k_norm."""
    bias = bool(shape.config["attention_bias"])
    return llama.attention(shape, index, make, qkv_bias=bias, output_bias=bias, qk_norm=True)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    mlp = make.mlp(f"model.layers.{index}.mlp", shape.hidden_size, shape.intermediate_size)
    return llama.block(shape, attention(shape, index, make), mlp, make)
