"""Phi-3, 3.5 and 4: a Llama block with q, k and v in one matrix, and gate and up in one.

They are joined on disk and in memory. Part of each head rotates (Phi-4-mini); documents beyond the
pretraining length rotate by other frequencies (longrope).
Source: arXiv:2404.14219.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import llama
from unfreeze.models.allowed import Config, Fields, names
from unfreeze.models.blocks.rope import rope_from_config, rope_parameters, rotary_width
from unfreeze.models.layer_types import everywhere, mask
from unfreeze.models.shape import Shape, common, require

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = llama.RULES
ignored = llama.ignored
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
    },
    read=names("num_key_value_heads head_dim partial_rotary_factor"),
    null=names("num_key_value_heads sliding_window"),
    silent=names("auto_map"),  # the releases' own code, which computes what this file does
    neutral={"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},  # as Phi-4-mini has them
)
SCALED_BY = ("ntk",)
"""Scalings that --rope-scaling may write: transformers' Phi-3 reads longrope only, with searched divisors."""
LONG = ("su", "yarn")
"""Older names of longrope, found in Phi-3's configs only."""


def _named(config: Config) -> Config:
    """The config with longrope's older names replaced."""
    tables = {
        name: {**config[name], "rope_type": "longrope"}
        for name in ("rope_scaling", "rope_parameters")
        if isinstance(config.get(name), Mapping)
        and (config[name].get("rope_type") or config[name].get("type")) in LONG
    }
    return {**config, **tables}


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    config = _named(config)
    head_dim = int(
        config.get("head_dim") or require(config, "hidden_size") // require(config, "num_attention_heads")
    )
    kind = rope_parameters(config)["rope_type"]
    if kind not in ("default", "longrope"):
        raise CheckpointError(
            f"config.json: rope type {kind!r} is not built for model_type 'phi3'; built: default, longrope",
            next="compare rope_scaling with the publisher's config.json",
        )
    rope = rope_from_config(config, rotary_width(config, head_dim))
    kinds = everywhere(config)
    return common(config, family="phi3", rope=rope, head_dim=head_dim, layer_types=kinds)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    from unfreeze.models.blocks.attention import FusedAttention
    from unfreeze.models.blocks.mlp import FusedMLP

    name, hidden, width = f"model.layers.{index}", shape.hidden_size, shape.head_dim
    heads, keys, inner = shape.num_heads, shape.num_kv_heads, shape.intermediate_size
    attention = FusedAttention(
        index,
        width,
        heads,
        keys,
        qkv_proj=make.linear(f"{name}.self_attn.qkv_proj", hidden, (heads + 2 * keys) * width),
        o_proj=make.linear(f"{name}.self_attn.o_proj", heads * width, hidden),
        mask=mask(shape, index),
        pairs="leading halves",
    )
    mlp = FusedMLP(
        gate_up_proj=make.linear(f"{name}.mlp.gate_up_proj", hidden, 2 * inner),
        down_proj=make.linear(f"{name}.mlp.down_proj", inner, hidden),
    )
    return llama.block(shape, attention, mlp, make)
