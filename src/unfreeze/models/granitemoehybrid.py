"""Granite 4: Mamba-2 and attention layers in Granite's scaled block, with experts beside an MLP or without.

Source: the model cards of Granite 4.0 and its published config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import granite, granitemoe, llama, mamba, mixtral, qwen3_moe
from unfreeze.models.allowed import Fields, names
from unfreeze.models.layer_types import FULL, LINEAR, layer_types
from unfreeze.models.shape import Shape, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.bytes import Block
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import ScaledLayer

_LAYER = "model.layers.{layer}."
RULES = (
    *granitemoe.RULES,
    *(
        StackRule(f"{_LAYER}shared_mlp.{name}.{{part}}", f"{_LAYER}{mlp}.{name}.{{part}}")
        for mlp in ("mlp.shared_experts", "mlp")
        for name in ("input_linear", "output_linear")
    ),
    *mamba.decay_rules(_LAYER + "mamba.", _LAYER + "mamba."),
)
ignored = llama.ignored
ends = granite.ends
FIELDS = Fields(
    absent={
        **granitemoe.FIELDS.absent,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": mamba.NO_LIMITS,
    },
    read=names("num_key_value_heads layer_types position_embedding_type"),
    null=names("num_key_value_heads"),
    only={"normalization_function": lambda config: "rmsnorm"},
    silent=names("mamba_chunk_size init_method"),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: intermediate_size is an expert's; no experts if num_local_experts is 0."""
    kinds = layer_types(mamba.renamed_kinds(config), lambda index: LINEAR, (FULL, LINEAR))
    mamba.check(sizes(config))
    moe = mixtral.moe_shape(config) if config["num_local_experts"] else None
    return replace(llama.shape(config), family="granitemoehybrid", moe=moe, layer_types=kinds)


def any_rotates(shape: Shape) -> bool:
    """True for position_embedding_type "rope" alone."""
    return shape.config.get("position_embedding_type") == "rope"


def renamed(shape: Shape) -> tuple[tuple[str, str], ...]:
    """(ours, transformers') parts of module names."""
    mlp = "mlp.shared_experts." if shape.moe else "mlp."
    return (
        *granitemoe.RENAMED,
        (f"{mlp}input_linear", "shared_mlp.input_linear"),
        (f"{mlp}output_linear", "shared_mlp.output_linear"),
    )


def sizes(config: Mapping[str, Any]) -> mamba.Sizes:
    """Sizes of its Mamba-2 layers."""
    channels, heads = config["mamba_expand"] * require(config, "hidden_size"), config["mamba_n_heads"]
    width = config["mamba_d_head"]
    return mamba.Sizes(
        groups=("mamba_n_groups", config["mamba_n_groups"]),
        heads=("mamba_n_heads", heads),
        state=config["mamba_d_state"],
        width=channels // heads if width == "auto" else width,
        channels=("mamba_expand x hidden_size", channels),
        taps=config["mamba_d_conv"],
        conv_bias=config["mamba_conv_bias"],
        bias=config["mamba_proj_bias"],
        limits=mamba.limits(config),
        eps=config["rms_norm_eps"],
    )


def layer(shape: Shape, index: int, make: Factory) -> ScaledLayer:
    """Decoder layer `index`."""
    from unfreeze.models.layer import ScaledLayer

    config, linear = shape.config, shape.layer_types[index] == LINEAR
    if linear:
        mixer: Block = mamba.mixer(f"model.layers.{index}.mamba", shape.hidden_size, sizes(config), make)
    else:
        bias, scale = bool(config["attention_bias"]), float(config["attention_multiplier"])
        rope = "" if any_rotates(shape) else None
        mixer = llama.attention(shape, index, make, qkv_bias=bias, output_bias=bias, scale=scale, rope=rope)
    return ScaledLayer(
        float(config["residual_multiplier"]),
        self_attn=mixer,
        mlp=mlp(shape, index, make),
        input_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps),
        post_attention_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps),
        name="mamba" if linear else "self_attn",
    )


def mlp(shape: Shape, index: int, make: Factory) -> Block:
    """The MLP that every token passes, beside experts if the model has some."""
    from unfreeze.models.blocks.mlp import InputOutputMLP
    from unfreeze.models.blocks.moe import MoE

    name, hidden, width = (
        f"model.layers.{index}.mlp",
        shape.hidden_size,
        shape.config["shared_intermediate_size"],
    )
    own = f"{name}.shared_experts" if shape.moe else name
    shared = InputOutputMLP(
        input_linear=make.linear(f"{own}.input_linear", hidden, 2 * width),
        output_linear=make.linear(f"{own}.output_linear", width, hidden),
    )
    if shape.moe is None:
        return shared
    gate, experts = qwen3_moe.router(shape, make, normalize=True), make.experts_of(shape, name)
    return MoE(index, gate=gate, experts=experts, shared_experts=shared)
