"""DeepSeek-V3 and Kimi-K2, also the text part of Kimi-K2.5.

Multi-head latent attention (MLA), sigmoid routing with a selection bias, shared experts.
Source: arXiv:2412.19437; module names as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import llama, mla
from unfreeze.models.configs import deepseek_v3 as config_json
from unfreeze.models.shape import Shape

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
FIELDS = config_json.FIELDS
shape = config_json.shape


def ignored(shape: Shape) -> tuple[str, ...]:
    """Tensors of a checkpoint that are not part of this language model.

    Multi-token prediction heads, and Kimi-K2.5's vision side.
    """
    extra = int(shape.config.get("num_mtp_layers", shape.config["num_nextn_predict_layers"]))
    heads = tuple(rf"model\.layers\.{shape.num_layers + i}\..*" for i in range(extra))
    return (*heads, r"vision_tower\..*", r"mm_projector\..*", r".*rotary_emb\.inv_freq")


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
