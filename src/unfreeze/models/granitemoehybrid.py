"""Granite 4: Mamba-2 and attention layers in Granite's scaled block, with experts beside an MLP or without.

Source: the model cards of Granite 4.0 and its published config.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import granite, granitemoe, llama, mamba, qwen3_moe
from unfreeze.models.configs import granitemoehybrid as config_json
from unfreeze.models.layer_types import LINEAR
from unfreeze.models.shape import Shape

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
FIELDS = config_json.FIELDS
shape = config_json.shape


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


def layer(shape: Shape, index: int, make: Factory) -> ScaledLayer:
    """Decoder layer `index`."""
    from unfreeze.models.layer import ScaledLayer

    config, linear = shape.config, shape.layer_types[index] == LINEAR
    if linear:
        mixer: Block = mamba.mixer(
            f"model.layers.{index}.mamba", shape.hidden_size, config_json.sizes(config), make
        )
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
