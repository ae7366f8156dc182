"""DeepSeek-V3 and Kimi-K2, also the text part of Kimi-K2.5.

Multi-head latent attention (MLA), sigmoid routing with a selection bias, shared experts.
Source: arXiv:2412.19437; module names as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import llama, mla
from unfreeze.models.allowed import Config, Fields, names
from unfreeze.models.blocks.rope import rope_from_config
from unfreeze.models.shape import MLAShape, MoEShape, Shape, common, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.mlp import MLP
    from unfreeze.models.blocks.moe import MoE
    from unfreeze.models.blocks.routers import Router
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

_EXPERT = "model.layers.{layer}.mlp.experts.{expert}."
_STACK = "model.layers.{layer}.mlp.experts."
# transformers 5 can write stacked experts; such files are read, never written
FUSED = (
    StackRule(_STACK + "gate_up_proj", _STACK + "gate_up_proj.weight"),
    StackRule(_STACK + "down_proj", _STACK + "down_proj.weight"),
)
SINGLE = (
    StackRule(_EXPERT + "gate_proj.{part}", _STACK + "gate_up_proj.{part}", 0),
    StackRule(_EXPERT + "up_proj.{part}", _STACK + "gate_up_proj.{part}", 1),
    StackRule(_EXPERT + "down_proj.{part}", _STACK + "down_proj.{part}", None),
)
RULES = (*SINGLE, *FUSED)
QUANTIZED = tuple(replace(rule, instead=True) for rule in SINGLE)
"""For families whose releases are fused: quantizers write each expert under its own name."""
OTHER_NAMES: dict[str, Callable[[Config], object]] = {
    "num_local_experts": lambda config: config.get("n_routed_experts", config["num_local_experts"]),
    "num_mtp_layers": lambda config: config.get("num_nextn_predict_layers", config["num_mtp_layers"]),
}
"""Second names of two sizes; if both names are present they must agree."""
MLA_SIZES: dict[str, Callable[[Config], object]] = {
    "moe_layer_freq": lambda config: 1,
    "mla_use_nope": lambda config: False,
    # latent attention has a key and a value per head; the others are second names of sizes, and must agree
    "num_key_value_heads": lambda config: config.get("num_attention_heads"),
    "head_dim": lambda config: config.get("qk_rope_head_dim"),
    "qk_head_dim": lambda config: (
        (config.get("qk_nope_head_dim") or 0) + (config.get("qk_rope_head_dim") or 0)
    ),
    **OTHER_NAMES,
}
FIELDS = Fields(
    absent={
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "num_key_value_heads": 128,
    },
    read=names(
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts moe_intermediate_size"
    ),
    null=names("q_lora_rank num_key_value_heads"),
    only={"scoring_func": lambda config: "sigmoid", "topk_method": lambda config: "noaux_tc", **MLA_SIZES},
    never_null=names("norm_topk_prob rope_interleave"),
    silent=names("auto_map"),  # the releases' own code, which computes what this file does
)


def ignored(shape: Shape) -> tuple[str, ...]:
    """Tensors of a checkpoint that are not part of this language model.

    Multi-token prediction heads, and Kimi-K2.5's vision side.
    """
    extra = int(shape.config.get("num_mtp_layers", shape.config["num_nextn_predict_layers"]))
    heads = tuple(rf"model\.layers\.{shape.num_layers + i}\..*" for i in range(extra))
    return (*heads, r"vision_tower\..*", r"mm_projector\..*", r".*rotary_emb\.inv_freq")


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    latent = MLAShape(
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=int(require(config, "kv_lora_rank")),
        nope=int(require(config, "qk_nope_head_dim")),
        rope=int(require(config, "qk_rope_head_dim")),
        value=int(require(config, "v_head_dim")),
    )
    rope, moe = rope_from_config(config, latent.rope), moe_shape(config)
    return common(
        config, family="deepseek_v3", rope=rope, head_dim=latent.nope + latent.rope, mla=latent, moe=moe
    )


def moe_shape(config: Mapping[str, Any]) -> MoEShape:
    """Sizes of routed and shared experts; the first first_k_dense_replace layers have none."""
    return MoEShape(
        num_experts=int(
            config["num_local_experts"]
            if "num_local_experts" in config
            else require(config, "n_routed_experts")
        ),
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(require(config, "moe_intermediate_size")),
        num_shared_experts=int(config["n_shared_experts"]),
        dense_layers=frozenset(range(int(config["first_k_dense_replace"]))),
    )


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`: MLA, then a dense MLP (the first layers) or routed and shared experts."""
    return llama.block(shape, mla.attention(shape, index, make), mlp(shape, index, make, router), make)


def mlp(shape: Shape, index: int, make: Factory, router: Callable[[Shape, Factory], Router]) -> MLP | MoE:
    """A dense MLP if the layer is dense, else routed and shared experts."""
    from unfreeze.models.blocks.moe import MoE

    name, moe = f"model.layers.{index}.mlp", shape.moe
    if moe is None or not shape.is_moe(index):
        return make.mlp(name, shape.hidden_size, shape.intermediate_size)
    width = moe.num_shared_experts * moe.intermediate_size
    shared = make.mlp(f"{name}.shared_experts", shape.hidden_size, width) if width else None
    return MoE(index, gate=router(shape, make), experts=make.experts_of(shape, name), shared_experts=shared)


def router(shape: Shape, make: Factory) -> Router:
    """Sigmoid scores, a selection bias, the best groups."""
    from unfreeze.models.blocks.routers import noaux_tc

    config = shape.config
    routing = noaux_tc(
        int(config["n_group"]),
        int(config["topk_group"]),
        normalize=bool(config["norm_topk_prob"]),
        scale=float(config["routed_scaling_factor"]),
    )
    return make.router(shape, routing)
