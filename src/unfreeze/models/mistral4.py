"""Mistral 4: latent attention as in DeepSeek-V3 with queries that grow with the position, softmax routing.

Source: the release's config.json and transformers' class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import deepseek_v3, llama, ministral3, mla
from unfreeze.models.allowed import Fields, names
from unfreeze.models.blocks.rope import Temperature, rope_parameters
from unfreeze.models.configs.deepseek_v3 import MLA_SIZES
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.routers import Router
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

# fused, the only form that transformers reads and writes; or one name per expert, from quantizers
RULES = (*deepseek_v3.FUSED, *deepseek_v3.QUANTIZED)
ignored = deepseek_v3.ignored
TEMPERATURE = "temperature"
ROTARY = {
    **ministral3.ROTARY,
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}
"""Default of rope_parameters."""
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 1048576,
        "attention_bias": False,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_key_value_heads": 32,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "rope_interleave": True,
    },
    read=names("partial_rotary_factor"),
    null=names("q_lora_rank num_key_value_heads"),
    only={
        **MLA_SIZES,
        "head_dim": lambda config: config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "partial_rotary_factor": lambda config: (
            config["qk_rope_head_dim"] / (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        ),
    },
    never_null=names("norm_topk_prob rope_interleave"),
    # the rotary table repeats it; the outer field counts
    rope_silent=names("max_position_embeddings"),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json; qk_rope_head_dim is the rotary width of a head.

    Raises CheckpointError for a rotary table without llama_4_scaling_beta or its positions.
    """
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_parameters": ROTARY}
    sizes = deepseek_v3.shape({"num_nextn_predict_layers": 0, **config})
    table = rope_parameters(config)
    needed = {name: table.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings")}
    missing = [name for name, value in needed.items() if value is None]
    if missing or table["rope_type"] == "default":
        raise CheckpointError(
            f"config.json: the rotary table has no {', '.join(missing or ['rope_type'])}, which model_type"
            " 'mistral4' needs",
            next="get config.json from the model's publisher again",
        )
    growth, per = needed.values()
    heat = Temperature((0.0,), growth=float(growth or 0), per=float(per or 1))
    return replace(sizes, family="mistral4", ropes={TEMPERATURE: heat})


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    attention = mla.attention(shape, index, make, temperature=TEMPERATURE)
    return llama.block(shape, attention, deepseek_v3.mlp(shape, index, make, _router), make)


def _router(shape: Shape, make: Factory) -> Router:
    from unfreeze.models.blocks.routers import RoutingRule

    config = shape.config
    routing = RoutingRule(
        groups=int(config["n_group"]),
        topk_group=int(config["topk_group"]),
        best=2,
        normalize=bool(config["norm_topk_prob"]),
        added=1e-20,
        scale=float(config["routed_scaling_factor"]),
    )
    return make.router(shape, routing)
