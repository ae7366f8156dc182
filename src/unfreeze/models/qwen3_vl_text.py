"""The text part of Qwen3-VL: Qwen3's block.

A text has the same position along all three axes of the interleaved rotation, so the rotation equals Qwen3's.
Images and their layers (deepstack) are not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import llama, qwen3
from unfreeze.models.allowed import Fields, names
from unfreeze.models.blocks.rope import rope_parameters
from unfreeze.models.fields import shown
from unfreeze.models.shape import Shape

RULES = qwen3.RULES
ignored = qwen3.ignored
layer = qwen3.layer
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 128000,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "attention_bias": False,
    },
    null=names("num_key_value_heads"),
    rope_silent=names("mrope_section mrope_interleaved"),
    nested={
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 151936,
    },
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    section = rope_parameters(config).get("mrope_section", (0, 0, 0))
    if not isinstance(section, Sequence) or len(section) != 3:
        raise CheckpointError(
            f"config.json: mrope_section is {shown(section)}; it must be three numbers, one per axis",
            next="get config.json from the model's publisher again",
        )
    return replace(llama.shape(config), family="qwen3_vl_text")
