"""Gemma 3, alone and inside a multimodal release: Gemma 2's block with norms on q and k.

Five of six layers slide and have their own rope base. Source: arXiv:2503.19786.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import gemma2, llama
from unfreeze.models.allowed import names
from unfreeze.models.layer_types import FULL, SLIDING, layer_types, per_kind
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import SandwichLayer

RULES = llama.RULES
ignored = llama.ignored
ends = gemma2.ends
FIELDS = replace(
    gemma2.FIELDS,
    absent={
        **gemma2.FIELDS.absent,
        # a nested config is published without its class's defaults (4B: no heads, no vocabulary)
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    read=names("layer_types sliding_window_pattern rope_local_base_freq"),
    # no release has it, and transformers' class accepts but ignores it
    only={**gemma2.FIELDS.only, "attn_logit_softcapping": lambda config: None},
    silent=names("cache_implementation _sliding_window_pattern"),
    per_kind=(FULL, SLIDING),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json. Every sliding_window_pattern-th layer has full attention."""
    every = int(config.get("sliding_window_pattern", 6))
    kinds = layer_types(config, lambda index: SLIDING if (index + 1) % every else FULL)
    local = config.get("rope_local_base_freq", 1e4)
    full, sliding = per_kind(config, full=config.get("rope_theta", 1e6), sliding=local)
    return replace(
        llama.shape(full),
        family="gemma3_text",
        layer_types=kinds,
        ropes={SLIDING: llama.shape(sliding).rope},
        softcap=config.get("final_logit_softcapping"),
        config=dict(config),
    )


def layer(shape: Shape, index: int, make: Factory) -> SandwichLayer:
    """Decoder layer `index`."""
    rope = SLIDING if shape.layer_types[index] == SLIDING else ""
    return gemma2.layer(shape, index, make, qk_norm=True, rope=rope)
