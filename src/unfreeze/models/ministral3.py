"""Ministral 3: Mistral's block under yarn; queries grow with the position, as Llama 4's do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import llama, mistral
from unfreeze.models.allowed import Fields, names
from unfreeze.models.blocks.rope import rope_parameters
from unfreeze.models.layer_types import everywhere, mask
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = llama.RULES
ignored = llama.ignored
ROTARY = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Default of rope_parameters."""
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
    },
    null=names("num_key_value_heads head_dim sliding_window"),
    only=mistral.FIELDS.only,
    nested={**mistral.FIELDS.nested, "num_hidden_layers": 34, "vocab_size": 131072},
    # the rotary table repeats it; the outer field counts
    rope_silent=names("max_position_embeddings"),
)
QUERY = "query"  # the name of the queries' rotary tables


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    tables = [config[name] for name in ("rope_parameters", "rope_scaling") if name in config]
    if not tables:
        config = {**config, "rope_parameters": ROTARY}
    for name in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        if tables and not any(name in table for table in (*tables, config)):
            raise CheckpointError(
                f"config.json: the rotary table has no {name}, which model_type 'ministral3' needs",
                next="get config.json from the model's publisher again",
            )
    sizes = replace(llama.shape(config), family="ministral3", layer_types=everywhere(config))
    parameters = rope_parameters(config)
    growing = replace(
        sizes.rope,
        growth=float(parameters.get("llama_4_scaling_beta") or 0),
        per=float(parameters.get("original_max_position_embeddings") or 1),
    )
    return replace(sizes, ropes={QUERY: growing})


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    mlp = make.mlp(f"model.layers.{index}.mlp", shape.hidden_size, shape.intermediate_size)
    parts = {"mask": mask(shape, index), "query_rope": QUERY}
    attention = llama.attention(shape, index, make, qkv_bias=False, output_bias=False, **parts)
    return llama.block(shape, attention, mlp, make)
