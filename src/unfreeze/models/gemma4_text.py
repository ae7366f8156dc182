"""Gemma 4: Gemma 3's block with other heads in full-attention layers, whose values may be their keys.

Full layers have heads of global_head_dim, which rotate in part; with attention_k_eq_v their values are the
keys before norm and rotation. Values are normed; a layer's output is multiplied by a per-layer scalar. With
enable_moe_block (26B-A4B) each layer has experts beside its MLP, fused on disk.

Not implemented, and refused by name: embeddings per layer, shared keys and values.
Source: transformers 5.23, models/gemma4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import gemma2, llama
from unfreeze.models.configs import gemma4_text as config_json
from unfreeze.models.layer_types import FULL, SLIDING, mask
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.moe import NormedMoE
    from unfreeze.models.factory import Ends, Factory
    from unfreeze.models.layer import SandwichLayer

_LAYER = "model.layers.{layer}."
RULES = (
    StackRule(_LAYER + "experts.gate_up_proj", _LAYER + "moe.experts.gate_up_proj.weight"),
    StackRule(_LAYER + "experts.down_proj", _LAYER + "moe.experts.down_proj.weight"),
    StackRule(_LAYER + "router.proj.weight", _LAYER + "moe.gate.weight"),
    StackRule(_LAYER + "router.scale", _LAYER + "moe.gate.scale"),
    StackRule(_LAYER + "router.per_expert_scale", _LAYER + "moe.gate.per_expert_scale"),
    StackRule(_LAYER + "pre_feedforward_layernorm_2.weight", _LAYER + "moe.pre_norm.weight"),
    StackRule(_LAYER + "post_feedforward_layernorm_2.weight", _LAYER + "moe.post_norm.weight"),
)
RENAMED = (("moe.experts", "experts"),)
ignored = llama.ignored
FIELDS = config_json.FIELDS
shape = config_json.shape


def ends(shape: Shape, make: Factory) -> Ends:
    """As in Gemma 2, except for the final norm, whose gain is its weight."""
    return gemma2.ends(shape, make)._replace(norm=make.norm(shape.hidden_size, shape.rms_norm_eps))


def layer(shape: Shape, index: int, make: Factory) -> SandwichLayer:
    """Decoder layer `index`."""
    from unfreeze.models.blocks.attention import NormedValueAttention
    from unfreeze.models.blocks.nonlinearity import GATED_GELU
    from unfreeze.models.blocks.norm import PlainRMSNorm
    from unfreeze.models.layer import BesideLayer, GatedSandwichLayer

    name, hidden, eps = f"model.layers.{index}", shape.hidden_size, shape.rms_norm_eps
    bias, full = bool(shape.config["attention_bias"]), shape.layer_types[index] == FULL
    keys, width = (
        config_json.full_heads(shape.config, shape.layer_types)
        if full
        else (shape.num_kv_heads, shape.head_dim)
    )

    def projection(part: str, heads: int) -> Any:
        return make.linear(f"{name}.self_attn.{part}", hidden, heads * width, bias=bias)

    attention = NormedValueAttention(
        index,
        width,
        q_proj=projection("q_proj", shape.num_heads),
        k_proj=projection("k_proj", keys),
        v_proj=None if full and shape.config["attention_k_eq_v"] else projection("v_proj", keys),
        o_proj=make.linear(f"{name}.self_attn.o_proj", shape.num_heads * width, hidden, bias=bias),
        q_norm=make.norm(width, eps),
        k_norm=make.norm(width, eps),
        v_norm=make.norm(width, eps, PlainRMSNorm),
        scale=1.0,
        rope="" if full else SLIDING,
        mask=mask(shape, index),
    )
    mlp = make.mlp(f"{name}.mlp", hidden, shape.intermediate_size, activation=GATED_GELU)
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    parts: dict[str, Any] = {f"{norm}_layernorm": make.norm(hidden, eps) for norm in norms}
    parts |= {"self_attn": attention, "mlp": mlp}
    if shape.moe is None:
        return GatedSandwichLayer(make.scalar(), **parts)
    first = make.norm(hidden, eps)
    return BesideLayer(
        make.scalar(), moe=_moe(shape, index, make), post_feedforward_layernorm_1=first, **parts
    )


def _moe(shape: Shape, index: int, make: Factory) -> NormedMoE:
    from unfreeze.kernels.expert_mlp import GeGLU
    from unfreeze.models.blocks.moe import NormedMoE
    from unfreeze.models.blocks.routers import NormedRouter, RoutingRule

    hidden, eps = shape.hidden_size, shape.rms_norm_eps
    gate = make.router(shape, RoutingRule(normalize=True, eps=eps), NormedRouter)
    return NormedMoE(
        index,
        gate=gate,
        experts=make.experts_of(shape, f"model.layers.{index}.moe", activation=GeGLU()),
        pre_norm=make.norm(hidden, eps),
        post_norm=make.norm(hidden, eps),
    )
