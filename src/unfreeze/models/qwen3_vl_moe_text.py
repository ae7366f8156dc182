"""The text part of Qwen3-VL with experts: Qwen3-MoE's layers with Qwen3-VL's rotation.

On disk the experts are fused, [E, in, out] as published or [E, out, in] as written by transformers; the
vision side is carried over unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.core.errors import CheckpointError
from unfreeze.models import deepseek_v3, llama, qwen3_moe, qwen3_vl_text
from unfreeze.models.allowed import Fields, names
from unfreeze.models.shape import Shape, require

_STACK = "model.layers.{layer}.mlp.experts."
RULES = (
    StackRule(_STACK + "gate_up_proj", _STACK + "gate_up_proj.weight", transposed=True, either=True),
    StackRule(_STACK + "down_proj", _STACK + "down_proj.weight", transposed=True, either=True),
    *deepseek_v3.QUANTIZED,
)
ignored = llama.ignored
layer = qwen3_moe.layer
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128000,
        "num_key_value_heads": 16,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    },
    read=names("head_dim num_experts"),
    null=names("num_key_value_heads"),
    only={"norm_topk_prob": lambda config: True, **qwen3_moe.FIELDS.only},
    rope_silent=qwen3_vl_text.FIELDS.rope_silent,
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json; layers are sparse as in Qwen3-MoE.

    Raises CheckpointError for square experts, because their files don't tell in from out.
    """
    config = {**config, "norm_topk_prob": True}
    moe, hidden = qwen3_moe.moe_shape(config), require(config, "hidden_size")
    if hidden in (moe.intermediate_size, 2 * moe.intermediate_size):
        raise CheckpointError(
            f"config.json: experts of hidden_size {hidden:,} and moe_intermediate_size"
            f" {moe.intermediate_size:,} are not built: square, so that transposed ones look alike",
            next="open an issue with the model's name",
        )
    return replace(qwen3_vl_text.shape(config), family="qwen3_vl_moe_text", moe=moe)
