"""Widths of taps (core/taps.py), for a model that may be on "meta"."""

from __future__ import annotations

import torch

from unfreeze.core.taps import Tap
from unfreeze.models.blocks.mla import MLA
from unfreeze.models.decoder import Decoder


def tap_width(model: Decoder, tap: Tap) -> int:
    """Elements per token: D for an input, 1 for a divergence, heads · width for the others."""
    if tap.name in ("input", "divergence"):
        return model.shape.hidden_size if tap.name == "input" else 1
    layer = model.layers[tap.layer]
    sizes, attention = layer.bytes(torch.float32, "cpu").attention, layer.self_attn
    assert sizes is not None
    heads = sizes.heads if tap.name in ("q", "q_plain") else sizes.key_heads
    if tap.name == "v":
        return heads * sizes.value_width
    if tap.name in ("q_plain", "k_plain") and isinstance(attention, MLA):
        return heads * attention.nope
    return heads * sizes.width
