"""Granite 3 with experts: Granite's block and multipliers, experts chosen by softmax over the best logits.

On disk a layer's experts are one stack: block_sparse_moe.input_linear (gate, up) and output_linear.
Source: the Granite 3.0 report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import deepseek_v3, granite, llama, mixtral, qwen3_moe
from unfreeze.models.allowed import Fields, names
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import ScaledLayer

_DISK, _OURS = "model.layers.{layer}.block_sparse_moe.", "model.layers.{layer}.mlp."
RULES = (
    StackRule(_DISK + "input_linear.{part}", _OURS + "experts.gate_up_proj.{part}"),
    StackRule(_DISK + "output_linear.{part}", _OURS + "experts.down_proj.{part}"),
    StackRule(_DISK + "router.layer.weight", _OURS + "gate.weight"),
    *deepseek_v3.FUSED,
)
RENAMED = (("mlp.experts", "block_sparse_moe.experts"),)
ignored = llama.ignored
ends = granite.ends
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        **granite.MULTIPLIERS,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    read=names("num_key_value_heads"),
    null=names("num_key_value_heads"),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: intermediate_size is an expert's; no layer is dense."""
    return replace(llama.shape(config), family="granitemoe", moe=mixtral.moe_shape(config))


def layer(shape: Shape, index: int, make: Factory) -> ScaledLayer:
    """Decoder layer `index`. Softmax over the chosen logits is softmax over all, renormalised."""
    from unfreeze.models.blocks.moe import MoE

    experts = make.experts_of(shape, f"model.layers.{index}.mlp")
    gate = qwen3_moe.router(shape, make, normalize=True)
    mlp = MoE(index, gate=gate, experts=experts, shared_experts=None)
    return granite.block(shape, index, mlp, make)
