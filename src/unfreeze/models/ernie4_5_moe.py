"""ERNIE 4.5 with experts: Llama attention rotated in adjacent pairs, softmax routing with a selection bias.

Source: the ERNIE 4.5 report, and module names as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import deepseek_v3, llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.shape import MoEShape, Shape, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.routers import Router
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

_BIAS = "e_score_correction_bias"
RULES = (
    *deepseek_v3.RULES,
    StackRule(f"model.layers.{{layer}}.mlp.moe_statics.{_BIAS}", f"model.layers.{{layer}}.mlp.gate.{_BIAS}"),
)
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "rope_theta": 500000.0,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    read=names("head_dim moe_layer_end_index num_nextn_predict_layers"),
    null=names("num_key_value_heads"),
    only={
        "use_bias": lambda config: False,
        "moe_gate": lambda config: "topk",
        "moe_use_aux_free": lambda config: True,
        "num_experts": lambda config: config["moe_num_experts"],
        "num_experts_per_tok": lambda config: config["moe_k"],
    },
    silent=names("moe_capacity moe_aux_loss_lambda moe_orthogonal_loss_lambda moe_z_loss_lambda"),
    neutral={"use_rmsnorm": True},
)


def ignored(shape: Shape) -> tuple[str, ...]:
    """Multi-token prediction heads."""
    return (*llama.ignored(shape), r"(model\.)?mtp_.*")


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json.

    Experts are in every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index (-1 or
    absent: the last layer).
    """
    layers, end = int(require(config, "num_hidden_layers")), int(config.get("moe_layer_end_index", -1))
    start, interval = int(config["moe_layer_start_index"]), int(config["moe_layer_interval"])
    last = layers - 1 if end == -1 else end
    moe = MoEShape(
        num_experts=int(config["moe_num_experts"]),
        experts_per_token=int(config["moe_k"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        num_shared_experts=int(config["moe_num_shared_experts"]),
        dense_layers=frozenset(i for i in range(layers) if not start <= i <= last or (i + 1) % interval),
    )
    return replace(llama.shape(config), family="ernie4_5_moe", moe=moe)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    attention = llama.attention(shape, index, make, qkv_bias=False, output_bias=False, pairs="adjacent")
    return llama.block(shape, attention, deepseek_v3.mlp(shape, index, make, _router), make)


def _router(shape: Shape, make: Factory) -> Router:
    from unfreeze.models.blocks.routers import RoutingRule

    smallest = float(shape.config["moe_norm_min"])
    return make.router(shape, RoutingRule(correction="1 E", normalize=True, smallest=smallest))
