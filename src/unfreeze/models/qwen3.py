"""Qwen3: a Llama block with an RMSNorm per head on q and k, no biases. Source: arXiv:2505.09388."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze.models import llama
from unfreeze.models.blocks.attention import Attention
from unfreeze.models.decoder import Layer
from unfreeze.models.factory import Factory
from unfreeze.models.shape import Shape

RULES = llama.RULES
ignored = llama.ignored


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json; the head width defaults to 128 as in the reference configuration."""
    return replace(llama.shape({**config, "head_dim": config.get("head_dim") or 128}), family="qwen3")


def attention(shape: Shape, index: int, make: Factory) -> Attention:
    """GQA with q_norm and k_norm."""
    bias = bool(shape.config.get("attention_bias", False))
    return llama.attention(shape, index, make, qkv_bias=bias, output_bias=bias, qk_norm=True)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    mlp = make.mlp(f"model.layers.{index}.mlp", shape.hidden_size, shape.intermediate_size)
    return llama.block(shape, attention(shape, index, make), mlp, make)
