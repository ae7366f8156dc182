"""config.json of Llama 4's text model: the layers that rotate, see chunks, or have experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import llama, smollm3
from unfreeze.models.allowed import Fields, names
from unfreeze.models.blocks.rope import Temperature
from unfreeze.models.fields import shown
from unfreeze.models.shape import MoEShape, Shape, require

FULL, CHUNKED = "full_attention", "chunked_attention"
TEMPERATURE = "temperature"  # the name of the table that scales the queries of layers without rotation
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    read=names("moe_layers no_rope_layers layer_types"),
    null=names("num_key_value_heads attention_chunk_size"),
    silent=names("for_llm_compressor cache_implementation"),
    nested={"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "vocab_size": 202048},
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: experts in moe_layers, or in every interleave_moe_layer_step-th layer.

    Raises CheckpointError for a kind of layer that is not implemented, and for chunked layers without a chunk
    size.
    """
    layers, step = int(require(config, "num_hidden_layers")), int(config["interleave_moe_layer_step"])
    sparse = config.get("moe_layers")
    sparse = range(step - 1, layers, step) if sparse is None else sparse
    moe = MoEShape(
        num_experts=int(config["num_local_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        num_shared_experts=1,
        dense_layers=frozenset(range(layers)) - frozenset(sparse),
    )
    sizes = llama.shape(config)
    if config["use_qk_norm"]:
        llama.refuse_sized_tables(sizes)
    growth = float(config["attn_scale"]) if config["attn_temperature_tuning"] else 0.0
    none = (0.0,) * (sizes.head_dim // 2)
    heat = Temperature(none, growth=growth, per=float(config["floor_scale"]), first=1)
    kinds = _layer_types(config)
    return replace(sizes, family="llama4_text", moe=moe, layer_types=kinds, ropes={TEMPERATURE: heat})


def _layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    usual = [CHUNKED if rotating else FULL for rotating in rotates(config)]
    kinds = tuple(config.get("layer_types") or usual)
    unknown = [kind for kind in kinds if kind not in (FULL, CHUNKED)]
    if unknown or len(kinds) != len(usual):
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds):,} entries, of them {shown(unknown[:1])} not built;"
            f" built: {len(usual):,} of {FULL} and {CHUNKED}",
            next="get config.json from the model's publisher again",
        )
    if CHUNKED in kinds and not config.get("attention_chunk_size"):
        raise CheckpointError(
            f"config.json: layers are {CHUNKED}, and attention_chunk_size is absent",
            next="get config.json from the model's publisher again",
        )
    return kinds


def rotates(config: Mapping[str, Any]) -> list[bool]:
    """As in SmolLM3; an empty list counts as absent."""
    return smollm3.rotates({**config, "no_rope_layers": config.get("no_rope_layers") or None})
