"""Nemotron-H and Nemotron 3: a layer is Mamba-2, attention without rotation, an MLP or experts.

Experts and MLPs have no gate: down(max(up x, 0)²). The experts of Nemotron 3 Super and Ultra see a narrower
width.
Source: arXiv:2504.03624; NVIDIA's code of the releases for time_step_limit (transformers 5.23 clamps dt at
time_step_min instead, huggingface/transformers#48989).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import deepseek_v3, llama, mamba
from unfreeze.models.configs import nemotron_h as config_json
from unfreeze.models.layer_types import FULL, LINEAR
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.bytes import Block
    from unfreeze.models.blocks.mlp import UpDownMLP
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import SingleLayer

_DISK, _OURS = "backbone.layers.{layer}.", "model.layers.{layer}."
_STACKS = tuple((name, f"mixer.experts.{name}_proj") for name in ("up", "down"))
RULES = (
    *mamba.decay_rules(_DISK + "mixer.", _OURS + "mixer."),
    *(
        StackRule(f"{_DISK}mixer.experts.{{expert}}.{name}_proj.{{part}}", f"{_OURS}{stack}.{{part}}")
        for name, stack in _STACKS
    ),
    *(StackRule(_DISK + stack, f"{_OURS}{stack}.weight") for _, stack in _STACKS),
    *(
        StackRule(f"{_DISK}{inner}.{{part}}", f"{_OURS}{inner}.{{part}}")
        for inner in ("{a}", "{a}.{b}", "{a}.{b}.{c}")
    ),
    StackRule("backbone.embeddings.weight", "model.embed_tokens.weight"),
    StackRule("backbone.norm_f.weight", "model.norm.weight"),
)
FIELDS = config_json.FIELDS
shape = config_json.shape


def ignored(shape: Shape) -> tuple[str, ...]:
    """Layers that predict several tokens."""
    return (r"mtp\..*",)


def any_rotates(shape: Shape) -> bool:
    """False: attention has no positions."""
    return False


def layer(shape: Shape, index: int, make: Factory) -> SingleLayer:
    """Decoder layer `index`."""
    from unfreeze.models.layer import SingleLayer

    norm = make.norm(shape.hidden_size, shape.rms_norm_eps)
    return SingleLayer(mixer=mixer(shape, index, make), norm=norm)


def mixer(shape: Shape, index: int, make: Factory) -> Block:
    """The mixer of layer `index`."""
    kind, name, config = shape.layer_types[index], f"model.layers.{index}.mixer", shape.config
    if kind == LINEAR:
        return mamba.mixer(name, shape.hidden_size, config_json.sizes(config), make)
    if kind == FULL:
        return llama.attention(
            shape, index, make, qkv_bias=False, output_bias=False, rope=None, module="mixer"
        )
    if kind == config_json.MLP:
        return mlp(shape, name, shape.intermediate_size, make)
    return experts(shape, index, name, make)


def mlp(shape: Shape, name: str, width: int, make: Factory) -> UpDownMLP:
    """down(max(up x, 0)²)."""
    from unfreeze.models.blocks.mlp import UpDownMLP
    from unfreeze.models.blocks.nonlinearity import SQUARED_RELU

    bias = bool(shape.config["mlp_bias"])
    return UpDownMLP(
        up_proj=make.linear(f"{name}.up_proj", shape.hidden_size, width, bias=bias),
        down_proj=make.linear(f"{name}.down_proj", width, shape.hidden_size, bias=bias),
        activation=SQUARED_RELU,
    )


def experts(shape: Shape, index: int, name: str, make: Factory) -> Block:
    """Experts, chosen as in DeepSeek-V3, beside a shared one that every token passes."""
    from unfreeze.kernels.expert_mlp import SquaredReLU
    from unfreeze.models.blocks.experts import PlainExperts
    from unfreeze.models.blocks.moe import LatentMoE, MoE

    config, latent = shape.config, shape.moe.latent if shape.moe else 0
    width = config["moe_shared_expert_intermediate_size"]
    parts: dict[str, Any] = {
        "gate": deepseek_v3.router(shape, make),
        "experts": make.experts_of(shape, name, kind=PlainExperts, activation=SquaredReLU()),
        "shared_experts": mlp(shape, f"{name}.shared_experts", width, make),
    }
    if not latent:
        return MoE(index, **parts)
    bias, D = bool(config["mlp_bias"]), shape.hidden_size
    parts["fc1_latent_proj"] = make.linear(f"{name}.fc1_latent_proj", D, latent, bias=bias)
    parts["fc2_latent_proj"] = make.linear(f"{name}.fc2_latent_proj", latent, D, bias=bias)
    return LatentMoE(index, **parts)
