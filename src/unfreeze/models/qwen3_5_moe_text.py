"""Qwen3.5-MoE, the language model: Qwen3.5's layers with routed experts and a gated shared one.

Source: the model card of Qwen3.5-35B-A3B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import deepseek_v3, qwen2_moe, qwen3_5_text, qwen3_moe, qwen3_next
from unfreeze.models.configs.qwen3_next import hybrid
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = (*deepseek_v3.FUSED, *deepseek_v3.QUANTIZED, *qwen3_next.DECAY)
ignored = qwen3_next.ignored
ends = qwen3_next.ends
SIZES = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
FIELDS = replace(
    qwen3_5_text.FIELDS,
    absent={**qwen3_5_text.HYBRID, **SIZES, "num_key_value_heads": 2, "intermediate_size": 0},
    nested={"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "vocab_size": 248320},
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: every layer is sparse, and the weights of the chosen experts sum to one."""
    dense = {"decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": True}
    moe = qwen3_moe.moe_shape({**config, **dense}, num_shared_experts=1)
    sizes = hybrid(config)
    return replace(sizes, family="qwen3_5_moe_text", moe=moe, config={**sizes.config, **dense})


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    return qwen3_next.block(shape, index, make, qwen2_moe.mlp(shape, index, make), fused=False)
