"""LFM2-MoE: LFM2's layers; all but the first have experts. Source: the model card of LFM2-8B-A1B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import deepseek_v3, lfm2, mixtral
from unfreeze.models.allowed import Fields, names
from unfreeze.models.configs.lfm2 import ABSENT, sized
from unfreeze.models.shape import MoEShape, Shape, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.routers import Router
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

_DISK, _OURS = "model.layers.{layer}.feed_forward.", "model.layers.{layer}.mlp."
RULES = (
    *lfm2.RULES,
    *(replace(rule, disk=rule.disk.replace("block_sparse_moe", "feed_forward")) for rule in mixtral.SINGLE),
    *(replace(rule, disk=rule.disk.replace(".mlp.", ".feed_forward.")) for rule in deepseek_v3.FUSED),
    StackRule(_DISK + "expert_bias", _OURS + "gate.e_score_correction_bias"),
)
RENAMED = (*lfm2.RENAMED, ("mlp.experts", "feed_forward.experts"))
ignored = lfm2.ignored
FIELDS = Fields(
    absent={
        **ABSENT,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    read=names("layer_types tie_embedding"),
    only={"num_local_experts": lambda config: config["num_experts"]},
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: the first num_dense_layers have a dense MLP."""
    require(config, "layer_types")
    moe = MoEShape(
        num_experts=int(config["num_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        num_shared_experts=0,
        dense_layers=frozenset(range(int(config["num_dense_layers"]))),
    )
    return replace(sized(config, ()), family="lfm2_moe", moe=moe)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    return lfm2.block(shape, index, make, deepseek_v3.mlp(shape, index, make, _router))


def _router(shape: Shape, make: Factory) -> Router:
    from unfreeze.models.blocks.routers import RoutingRule

    config = shape.config
    routing = RoutingRule(
        "sigmoid",
        "E" if config["use_expert_bias"] else None,
        normalize=bool(config["norm_topk_prob"]),
        added=1e-6,
        scale=float(config["routed_scaling_factor"]),
    )
    return make.router(shape, routing)
