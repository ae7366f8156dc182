"""Qwen3.5, the dense language model: Qwen3-Next's layers with projections apart, and dense MLPs.

Text has one position on all three axes of mrope, so its sections have no effect. Source: the model card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama, qwen3_next
from unfreeze.models.allowed import Fields, names
from unfreeze.models.configs.qwen3_next import SIZES, hybrid
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = qwen3_next.DECAY
ignored = qwen3_next.ignored
ends = qwen3_next.ends
HYBRID: Mapping[str, Any] = {
    **llama.ABSENT,
    **SIZES,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "attention_bias": False,
}
ONE_VALUE = {"attn_output_gate": lambda config: True, "mlp_only_layers": lambda config: []}
SILENT = names("mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype")
"""Heads that predict several tokens are carried along; the state is in float32 here whatever the field."""
FIELDS = Fields(
    absent={**HYBRID, "num_key_value_heads": 4},
    read=names("layer_types full_attention_interval partial_rotary_factor"),
    only=ONE_VALUE,
    silent=SILENT,
    rope_silent=names("mrope_section mrope_interleaved"),
    nested={
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "vocab_size": 248320,
    },
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    return replace(hybrid(config), family="qwen3_5_text")


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    mlp = make.mlp(f"model.layers.{index}.mlp", shape.hidden_size, shape.intermediate_size)
    return qwen3_next.block(shape, index, make, mlp, fused=False)
