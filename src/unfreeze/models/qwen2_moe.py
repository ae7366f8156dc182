"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen2 attention, softmax routing, a gated shared expert.

Source: arXiv:2407.10671.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama, qwen2, qwen3_moe
from unfreeze.models.allowed import Fields, names
from unfreeze.models.shape import Shape, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.mlp import MLP
    from unfreeze.models.blocks.moe import MoE
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = qwen3_moe.RULES
ignored = llama.ignored
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "norm_topk_prob": False,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "qkv_bias": True,
    },
    read=names("head_dim"),
    null=names("num_key_value_heads"),
    only=qwen3_moe.FIELDS.only,
    silent=qwen2.WINDOW,
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json; layers are sparse as in Qwen3-MoE."""
    moe = qwen3_moe.moe_shape(config, num_shared_experts=1)
    return replace(llama.shape(config), family="qwen2_moe", moe=moe)


def mlp(shape: Shape, index: int, make: Factory) -> MLP | MoE:
    """The MLP of a layer: dense if the config says so, otherwise routed experts and the shared one."""
    from unfreeze.models.blocks.moe import GatedSharedMoE

    name, width = f"model.layers.{index}.mlp", int(require(shape.config, "shared_expert_intermediate_size"))
    if not shape.is_moe(index):
        return make.mlp(name, shape.hidden_size, shape.intermediate_size)
    return GatedSharedMoE(
        index,
        gate=qwen3_moe.router(shape, make, normalize=bool(shape.config["norm_topk_prob"])),
        experts=make.experts_of(shape, name),
        shared_expert=make.mlp(f"{name}.shared_expert", shape.hidden_size, width),
        shared_expert_gate=make.linear(f"{name}.shared_expert_gate", shape.hidden_size, 1),
    )


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    bias = bool(shape.config["qkv_bias"])
    attention = llama.attention(shape, index, make, qkv_bias=bias, output_bias=False)
    return llama.block(shape, attention, mlp(shape, index, make), make)
