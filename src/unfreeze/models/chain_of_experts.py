"""Chain of Experts: grouped-query attention, and experts that a token passes several times (blocks/chain.py).

A family of this project: no other program loads it. Its fields are named as in the published code: inner_iter
C passes, use_igate a gate per pass, inner_residual, outer_residual. inner_norm is ours: a norm and a true
residual for each pass; with it and inner_iter 1 a layer is that of Qwen3-MoE (softmax, greedy) or of GLM-4.5
(sigmoid, noaux_tc). Source: arXiv:2506.18945.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import deepseek_v3, llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.configs.deepseek_v3 import moe_shape
from unfreeze.models.shape import Shape, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.moe import MoE
    from unfreeze.models.blocks.routers import Router
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = deepseek_v3.RULES
ignored = llama.ignored
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_igate": True,
        "inner_norm": True,
        "inner_residual": True,
        "outer_residual": True,
    },
    read=names(
        "num_key_value_heads head_dim n_routed_experts num_experts_per_tok moe_intermediate_size inner_iter"
    ),
    only={"n_group": lambda config: 1, "topk_group": lambda config: 1, "moe_layer_freq": lambda config: 1},
    never_null=names("norm_topk_prob use_qk_norm use_igate inner_norm inner_residual outer_residual"),
)
CHOICES = {"scoring_func": ("sigmoid", "softmax"), "topk_method": ("noaux_tc", "greedy")}


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    for field, values in CHOICES.items():
        if config[field] not in values:
            raise CheckpointError(
                f"config.json: {field} {config[field]!r} is not built for chain_of_experts",
                next=f"write {' or '.join(map(repr, values))}",
            )
    if config["inner_norm"] and not (config["inner_residual"] and config["outer_residual"]):
        raise CheckpointError(
            "config.json: inner_norm true has one true residual: inner_residual and outer_residual are true",
            next='write "inner_norm": false to choose the residuals',
        )
    require(config, "num_experts_per_tok")
    moe = replace(moe_shape(config), passes=int(require(config, "inner_iter")))
    return replace(llama.shape(config), family="chain_of_experts", moe=moe)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`: dense (the first layers), or a chain."""
    from unfreeze.models.blocks import chain
    from unfreeze.models.blocks.moe import MoE, ReadMoE

    bias, config = bool(shape.config["attention_bias"]), shape.config
    qk_norm = bool(config["use_qk_norm"])
    attention = llama.attention(shape, index, make, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm)
    name, moe = f"model.layers.{index}.mlp", shape.moe
    if moe is None or not shape.is_moe(index):
        return llama.block(shape, attention, make.mlp(name, shape.hidden_size, shape.intermediate_size), make)
    width = moe.num_shared_experts * moe.intermediate_size
    shared = make.mlp(f"{name}.shared_experts", shape.hidden_size, width) if width else None
    experts = make.experts_of(shape, name)
    first: MoE = (ReadMoE if moe.passes > 1 else MoE)(
        index, gate=router(shape, make), experts=experts, shared_experts=shared
    )

    def again(number: int) -> chain.Again:
        gate = router(shape, make) if config["use_igate"] else None
        norm = make.norm(shape.hidden_size, shape.rms_norm_eps) if config["inner_norm"] else None
        kind = chain.Again if number == moe.passes - 1 else chain.AgainRead
        return kind(index + number * shape.num_layers, first, gate, norm)

    block = llama.block(shape, attention, first, make)
    parts: dict[str, Any] = {name: part for name, part in block.named_children()}
    parts["passes"] = [again(number) for number in range(1, moe.passes)]
    if config["inner_norm"]:
        return chain.ChainLayer(**parts)
    residuals = {name: bool(config[f"{name}_residual"]) for name in ("inner", "outer")}
    return chain.InnerChainLayer(**residuals, **parts)


def router(shape: Shape, make: Factory) -> Router:
    """Sigmoid or softmax scores; noaux_tc: with a selection bias, which loss-free balancing moves."""
    from unfreeze.models.blocks.routers import RoutingRule, noaux_tc

    config = shape.config
    rule = noaux_tc(normalize=bool(config["norm_topk_prob"]), scale=float(config["routed_scaling_factor"]))
    if config["scoring_func"] == "softmax":
        rule = RoutingRule("softmax", "E", normalize=rule.normalize, scale=rule.scale)
    return make.router(shape, rule if config["topk_method"] == "noaux_tc" else replace(rule, correction=None))
