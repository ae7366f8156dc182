"""Gemma 4: Gemma 3's block with other heads in full-attention layers, whose values may be their keys.

Full layers have heads of global_head_dim, which rotate in part; with attention_k_eq_v their values are the
keys before norm and rotation. Values are normed; a layer's output is multiplied by a per-layer scalar. With
enable_moe_block (26B-A4B) each layer has experts beside its MLP, fused on disk.

Not implemented, and refused by name: embeddings per layer, shared keys and values.
Source: transformers 5.23, models/gemma4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.core.errors import CheckpointError
from unfreeze.models import gemma2, llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.blocks.rope import rope_from_config
from unfreeze.models.fields import Whole, shown
from unfreeze.models.layer_types import FULL, SLIDING, layer_types, mask, per_kind, require_tables
from unfreeze.models.shape import MoEShape, Shape, require

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
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "hidden_activation": gemma2.GELU,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
    },
    read=names(
        "layer_types global_head_dim num_global_key_value_heads per_layer_config partial_rotary_factor"
        " num_experts top_k_experts moe_intermediate_size"
    ),
    null=names("final_logit_softcapping"),
    only={
        "hidden_activation": lambda config: gemma2.GELU,
        "use_bidirectional_attention": lambda config: "vision",  # text has no vision tokens
        "hidden_size_per_layer_input": lambda config: 0,
        "num_kv_shared_layers": lambda config: 0,
        "rope_scaling": lambda config: {},  # rope_parameters has a table per kind of layer
    },
    # of unimplemented parts, so without effect unless those are enabled
    silent=names("vocab_size_per_layer_input use_double_wide_mlp"),
    per_kind=(FULL, SLIDING),
)
ROTARY = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""Default of rope_parameters."""


def full_heads(config: Mapping[str, Any], kinds: tuple[str, ...]) -> tuple[int, int]:
    """(key heads, width) of full layers: from two fields, or from per_layer_config."""
    keys, width = int(config["num_key_value_heads"]), int(config.get("global_head_dim", 512))
    if config["attention_k_eq_v"] and config.get("num_global_key_value_heads"):
        keys = int(config["num_global_key_value_heads"])
    if "per_layer_config" not in config:
        return keys, width
    keys, width = int(config["num_key_value_heads"]), int(config["head_dim"])
    per_layer = config["per_layer_config"]
    if not per_layer:  # transformers writes it like this if no layer differs
        return keys, width
    full = {index for index, kind in enumerate(kinds) if kind == FULL}
    named = {int(index) for index in per_layer if str(index).isdecimal()}
    first = next(iter(per_layer.values()), {})
    known = {"head_dim": Whole(1, 2**16), "num_key_value_heads": Whole(1, 2**16)}
    alike = isinstance(first, Mapping) and all(table == first for table in per_layer.values())
    whole = alike and all(name in known and known[name](value) for name, value in first.items())
    if not whole or named != full or len(named) < len(per_layer):
        raise CheckpointError(
            f"config.json: per_layer_config {shown(config['per_layer_config'])} is not built for model_type"
            " 'gemma4_text'; built: head_dim and num_key_value_heads, alike in all full layers",
            next="open an issue with the model's name",
        )
    return first.get("num_key_value_heads", keys), first.get("head_dim", width)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: head_dim is that of sliding layers."""
    kinds = layer_types(config, lambda index: SLIDING if (index + 1) % 6 else FULL)
    kinds = (*kinds[:-1], FULL)  # as in transformers, regardless of layer_types' last entry
    _, width = full_heads(config, kinds)
    tables = config.get("rope_parameters", ROTARY)
    require_tables(tables, "gemma4_text")
    full, sliding = per_kind({**config, "rope_parameters": tables}, full=1e6, sliding=1e4)
    return replace(
        llama.shape(sliding),
        family="gemma4_text",
        layer_types=kinds,
        rope=rope_from_config(full, width),
        ropes={SLIDING: llama.shape(sliding).rope},
        softcap=config.get("final_logit_softcapping"),
        config=dict(config),
        moe=_moe_shape(config) if config["enable_moe_block"] else None,
    )


def _moe_shape(config: Mapping[str, Any]) -> MoEShape:
    """Sizes of the experts beside every layer's MLP."""
    return MoEShape(
        num_experts=int(require(config, "num_experts")),
        experts_per_token=int(require(config, "top_k_experts")),
        intermediate_size=int(require(config, "moe_intermediate_size")),
        num_shared_experts=0,
        dense_layers=frozenset(),
    )


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
        full_heads(shape.config, shape.layer_types) if full else (shape.num_kv_heads, shape.head_dim)
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
