"""Mixtral: Mistral's attention, softmax routing renormalised over the chosen experts.

Early configs have Mistral 7B's sliding_window. On disk an expert is block_sparse_moe.experts.{e}.w1 (gate),
w3 (up) and w2 (down).
Source: arXiv:2401.04088.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import deepseek_v3, llama, mistral, qwen3_moe
from unfreeze.models.allowed import Fields, names
from unfreeze.models.layer_types import everywhere, mask
from unfreeze.models.shape import MoEShape, Shape, require

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

_DISK, _OURS = "model.layers.{layer}.block_sparse_moe.", "model.layers.{layer}.mlp."
SINGLE = (
    StackRule(_DISK + "experts.{expert}.w1.{part}", _OURS + "experts.gate_up_proj.{part}", 0),
    StackRule(_DISK + "experts.{expert}.w3.{part}", _OURS + "experts.gate_up_proj.{part}", 1),
    StackRule(_DISK + "experts.{expert}.w2.{part}", _OURS + "experts.down_proj.{part}", None),
    StackRule(_DISK + "gate.weight", _OURS + "gate.weight"),
)
RULES = (*SINGLE, *deepseek_v3.FUSED)
ignored = llama.ignored
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
    read=names("head_dim"),
    null=names("num_key_value_heads sliding_window"),
    only={**mistral.FIELDS.only, "num_experts": lambda config: config["num_local_experts"]},
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: intermediate_size is an expert's; no layer is dense."""
    sizes = replace(llama.shape(config), layer_types=everywhere(config))
    return replace(sizes, family="mixtral", moe=moe_shape(config))


def moe_shape(config: Mapping[str, Any]) -> MoEShape:
    """Experts in every layer, as wide as intermediate_size."""
    return MoEShape(
        num_experts=int(config["num_local_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(require(config, "intermediate_size")),
        num_shared_experts=0,
        dense_layers=frozenset(),
    )


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    from unfreeze.models.blocks.moe import MoE

    experts = make.experts_of(shape, f"model.layers.{index}.mlp")
    gate = qwen3_moe.router(shape, make, normalize=True)
    mlp = MoE(index, gate=gate, experts=experts, shared_experts=None)
    attention = llama.attention(
        shape, index, make, qkv_bias=False, output_bias=False, mask=mask(shape, index)
    )
    return llama.block(shape, attention, mlp, make)
