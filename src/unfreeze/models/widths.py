"""Widths of taps (core/taps.py), for a model that may be on "meta"."""

from __future__ import annotations

import torch

from unfreeze.core.errors import ConfigError
from unfreeze.core.taps import Tap
from unfreeze.models.blocks.attention import Attending
from unfreeze.models.blocks.mla import MLA
from unfreeze.models.decoder import Decoder


def tap_width(model: Decoder, tap: Tap) -> int:
    """Elements per token: the residual's for an input, 1 for a divergence, heads · width for the others.

    Raises ConfigError for queries, keys or values of a layer that has none of each head.
    """
    if tap.name in ("input", "divergence"):
        return model.shape.stream_size if tap.name == "input" else 1
    layer = model.layers[tap.layer]
    sizes, attention = layer.bytes(torch.float32, "cpu").attention, layer.attention
    if sizes is None or not isinstance(attention, (Attending, MLA)):
        parts = enumerate((other.attention for other in model.layers), 1)
        have = [str(number) for number, part in parts if isinstance(part, (Attending, MLA))]
        raise ConfigError(
            f"layer {tap.layer + 1} of this {model.shape.family} model has no queries, keys and values per"
            f" head to compare; layers that have: {', '.join(have) or 'none'}",
            next="name such layers (--distillation.layers), or compare hidden states (--distillation.hidden)",
        )
    if tap.name == "logit":
        return sizes.heads
    heads = sizes.heads if tap.name in ("q", "q_plain") else sizes.key_heads
    if tap.name == "v":
        return heads * sizes.value_width
    if tap.name in ("q_plain", "k_plain") and isinstance(attention, MLA):
        return heads * attention.nope
    return heads * sizes.width
