"""Qwen3-MoE: Qwen3 attention, softmax routing over many experts, no shared expert.

Source: arXiv:2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import deepseek_v3, llama, qwen2, qwen3
from unfreeze.models.allowed import Fields, names
from unfreeze.models.shape import MoEShape, Shape, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.mlp import MLP
    from unfreeze.models.blocks.routers import Router
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = deepseek_v3.RULES
ignored = llama.ignored
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "norm_topk_prob": False,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    },
    read=names("head_dim num_experts moe_intermediate_size"),
    only={"num_local_experts": lambda config: config.get("num_experts", config["num_local_experts"])},
    silent=qwen2.WINDOW,
    neutral=qwen3.QK_NORM,
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json.

    A layer is sparse if (index + 1) is a multiple of decoder_sparse_step and it isn't in mlp_only_layers.
    """
    return replace(qwen3.shape(config), family="qwen3_moe", moe=moe_shape(config))


def moe_shape(config: Mapping[str, Any], num_shared_experts: int = 0) -> MoEShape:
    """Sizes of the experts, and the layers without experts."""
    step, only = int(config["decoder_sparse_step"]), set(config["mlp_only_layers"])
    experts = int(
        config["num_local_experts"] if "num_local_experts" in config else require(config, "num_experts")
    )
    return MoEShape(
        num_experts=experts,
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(require(config, "moe_intermediate_size")),
        num_shared_experts=num_shared_experts,
        dense_layers=frozenset(
            i for i in range(int(require(config, "num_hidden_layers"))) if i in only or (i + 1) % step
        ),
    )


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`: dense if the config says so, otherwise routed experts."""
    from unfreeze.models.blocks.moe import MoE

    name = f"model.layers.{index}.mlp"
    if not shape.is_moe(index):
        mlp: MLP | MoE = make.mlp(name, shape.hidden_size, shape.intermediate_size)
    else:
        gate = router(shape, make, normalize=bool(shape.config["norm_topk_prob"]))
        mlp = MoE(index, gate=gate, experts=make.experts_of(shape, name), shared_experts=None)
    return llama.block(shape, qwen3.attention(shape, index, make), mlp, make)


def router(shape: Shape, make: Factory, *, normalize: bool) -> Router:
    """Softmax over all experts; `normalize`: the weights of the chosen sum to one."""
    from unfreeze.models.blocks.routers import RoutingRule

    return make.router(shape, RoutingRule(normalize=normalize))
