"""Nemotron-H and Nemotron 3: a layer is Mamba-2, attention without rotation, an MLP or experts.

Experts and MLPs have no gate: down(max(up x, 0)²). The experts of Nemotron 3 Super and Ultra see a narrower
width.
Source: arXiv:2504.03624; NVIDIA's code of the releases for time_step_limit (transformers 5.23 clamps dt at
time_step_min instead, huggingface/transformers#48989).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.core.errors import CheckpointError
from unfreeze.models import deepseek_v3, llama, mamba
from unfreeze.models.allowed import Fields, names
from unfreeze.models.fields import NEXT, shown
from unfreeze.models.layer_types import FULL, LINEAR, layer_types
from unfreeze.models.shape import MoEShape, Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.bytes import Block
    from unfreeze.models.blocks.mlp import UpDownMLP
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import SingleLayer

MOE, MLP = "moe", "mlp"
LETTERS = {"M": LINEAR, "*": FULL, "E": MOE, "-": MLP}
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
FIELDS = Fields(
    absent={
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mlp_bias": False,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_limit": mamba.NO_LIMITS,
        "use_conv_bias": True,
        "use_bias": False,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    read=names("hybrid_override_pattern layers_block_type layer_types partial_rotary_factor"),
    null=names("moe_latent_size"),
    only={
        "mlp_hidden_act": lambda config: "relu2",
        "mamba_hidden_act": lambda config: "silu",
        "attention_bias": lambda config: False,
        "tie_word_embeddings": lambda config: False,  # transformers ties nothing, whatever it says
        "sliding_window": lambda config: None,
        "n_shared_experts": lambda config: 1,
        "attention_head_dim": lambda config: config["head_dim"],
        "norm_eps": lambda config: config["layer_norm_epsilon"],
        "rms_norm_eps": lambda config: config["layer_norm_epsilon"],
        "num_local_experts": lambda config: config["n_routed_experts"],
    },
    silent=names("""
        chunk_size expand time_step_min time_step_max time_step_floor time_step_rank mamba_ssm_cache_dtype
        rescale_prenorm_residual num_logits_to_keep use_mamba_kernels moe_shared_expert_overlap auto_map
        num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern
    """),
    neutral={"residual_in_fp32": False, "mamba_proj_bias": False},
)


def ignored(shape: Shape) -> tuple[str, ...]:
    """Layers that predict several tokens."""
    return (r"mtp\..*",)


def any_rotates(shape: Shape) -> bool:
    """False: attention has no positions."""
    return False


def kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The mixer of each layer: layers_block_type, or a letter each in hybrid_override_pattern."""
    listed = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern") or ""
    if listed is None:
        unknown = [letter for letter in pattern if letter not in LETTERS]
        if unknown or not pattern:
            what = f"holds {shown(unknown[0])}; known: {' '.join(LETTERS)}" if unknown else "is missing"
            raise CheckpointError(f"config.json: hybrid_override_pattern {what}", next=NEXT)
        listed = [LETTERS[letter] for letter in pattern]
    length = {"num_hidden_layers": len(listed), **config}
    declared = mamba.renamed_kinds({**length, "layer_types": listed})
    return layer_types(declared, lambda index: LINEAR, tuple(LETTERS.values()))


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json; num_hidden_layers may be absent."""
    of_layers = kinds(config)
    filled = {**config, "num_hidden_layers": len(of_layers), "rms_norm_eps": config["layer_norm_epsilon"]}
    mamba.check(sizes(config))
    moe = MoEShape(
        num_experts=int(config["n_routed_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        num_shared_experts=1,
        dense_layers=frozenset(index for index, kind in enumerate(of_layers) if kind != MOE),
        latent=int(config.get("moe_latent_size") or 0),
        matrices=2,
    )
    base = replace(llama.shape(filled), family="nemotron_h", layer_types=of_layers)
    return replace(base, moe=moe if MOE in of_layers else None)


def sizes(config: Mapping[str, Any]) -> mamba.Sizes:
    """Sizes of its Mamba-2 layers."""
    heads, width = config["mamba_num_heads"], config["mamba_head_dim"]
    return mamba.Sizes(
        groups=("n_groups", config["n_groups"]),
        heads=("mamba_num_heads", heads),
        state=config["ssm_state_size"],
        width=width,
        channels=("mamba_num_heads x mamba_head_dim", heads * width),
        taps=config["conv_kernel"],
        conv_bias=config["use_conv_bias"],
        bias=config["use_bias"],
        limits=mamba.limits(config),
        eps=config["layer_norm_epsilon"],
    )


def layer(shape: Shape, index: int, make: Factory) -> SingleLayer:
    """Decoder layer `index`."""
    from unfreeze.models.layer import SingleLayer

    norm = make.norm(shape.hidden_size, shape.rms_norm_eps)
    return SingleLayer(mixer=mixer(shape, index, make), norm=norm)


def mixer(shape: Shape, index: int, make: Factory) -> Block:
    """The mixer of layer `index`."""
    kind, name, config = shape.layer_types[index], f"model.layers.{index}.mixer", shape.config
    if kind == LINEAR:
        return mamba.mixer(name, shape.hidden_size, sizes(config), make)
    if kind == FULL:
        return llama.attention(
            shape, index, make, qkv_bias=False, output_bias=False, rope=None, module="mixer"
        )
    if kind == MLP:
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
