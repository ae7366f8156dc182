"""DeepSeek-V2 and V2-Lite: latent attention as in DeepSeek-V3, softmax routing within the best groups.

Source: arXiv:2405.04434.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import deepseek_v3, llama, mla
from unfreeze.models.allowed import Fields, names
from unfreeze.models.configs.deepseek_v3 import MLA_SIZES
from unfreeze.models.shape import Shape, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.routers import Router
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = deepseek_v3.RULES
ignored = deepseek_v3.ignored
METHODS = ("greedy", "group_limited_greedy")
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "norm_topk_prob": False,
    },
    read=names("num_experts_per_tok n_group topk_group"),
    null=names("q_lora_rank"),
    only={
        **MLA_SIZES,
        "scoring_func": lambda config: "softmax",
        "norm_topk_prob": lambda config: False,
        "mlp_bias": lambda config: False,
        "num_experts": lambda config: config["n_routed_experts"],
    },
    silent=names("auto_map"),  # the releases' own code, which computes what this file does
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json.

    Raises CheckpointError for a topk_method that is not implemented.
    """
    if config["topk_method"] not in METHODS:
        raise CheckpointError(
            f"config.json: topk_method {config['topk_method']!r} is not built for model_type 'deepseek_v2';"
            f" built: {', '.join(METHODS)}",
            next="open an issue with the model's name",
        )
    require(config, "num_experts_per_tok")
    pairs = {"num_nextn_predict_layers": 0, **config, "rope_interleave": True}
    return replace(deepseek_v3.shape(pairs), family="deepseek_v2")


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`: MLA, then a dense MLP (the first layers) or routed and shared experts."""
    mlp = deepseek_v3.mlp(shape, index, make, _router)
    return llama.block(shape, mla.attention(shape, index, make), mlp, make)


def _router(shape: Shape, make: Factory) -> Router:
    from unfreeze.models.blocks.routers import RoutingRule

    config = shape.config
    grouped = config["topk_method"] == "group_limited_greedy"
    routing = RoutingRule(
        groups=int(require(config, "n_group")) if grouped else 1,
        topk_group=int(require(config, "topk_group")) if grouped else 1,
        scale=float(config["routed_scaling_factor"]),
    )
    return make.router(shape, routing)
