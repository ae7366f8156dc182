"""MiniMax-M2: norms over the whole of q and k, a partial rotation, sigmoid routing with a selection bias.

Module names on disk as in the published checkpoints, which follow Mixtral's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import llama, mixtral, olmo2
from unfreeze.models.allowed import Fields, names
from unfreeze.models.blocks.rope import rope_from_config, rotary_width
from unfreeze.models.shape import Shape, common

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

_BIAS = "e_score_correction_bias"
RULES = (
    *mixtral.RULES,
    StackRule(f"model.layers.{{layer}}.block_sparse_moe.{_BIAS}", f"model.layers.{{layer}}.mlp.gate.{_BIAS}"),
)
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5000000.0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    read=names("rotary_dim partial_rotary_factor"),
    only={
        "use_qk_norm": lambda config: True,
        "qk_norm_type": lambda config: "per_layer",
        "use_routing_bias": lambda config: True,
        "scoring_func": lambda config: "sigmoid",
        "shared_intermediate_size": lambda config: 0,
        "attn_type_list": lambda config: [1] * int(config.get("num_hidden_layers") or 0),
        "num_experts": lambda config: config["num_local_experts"],
    },
    silent=names("auto_map use_mtp mtp_transformer_layers num_mtp_modules"),
)


def ignored(shape: Shape) -> tuple[str, ...]:
    """Multi-token prediction heads."""
    return (*llama.ignored(shape), r"(model\.)?mtp\..*")


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: rotary_dim of each head's head_dim elements rotate; all if it is absent."""
    head_dim = int(config["head_dim"])
    width = rotary_width(config, head_dim, int(config.get("rotary_dim", head_dim)) / head_dim)
    rope, moe = rope_from_config(config, width), mixtral.moe_shape(config)
    return common(config, family="minimax_m2", rope=rope, head_dim=head_dim, moe=moe)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    from unfreeze.models.blocks.moe import MoE
    from unfreeze.models.blocks.routers import noaux_tc

    gate = make.router(shape, noaux_tc())
    experts = make.experts_of(shape, f"model.layers.{index}.mlp")
    mlp = MoE(index, gate=gate, experts=experts, shared_experts=None)
    attention = olmo2.attention(shape, index, make, bias=False, pairs="leading halves")
    return llama.block(shape, attention, mlp, make)
