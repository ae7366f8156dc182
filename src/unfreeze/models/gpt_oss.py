"""gpt-oss: attention with sinks, every second layer with a window; experts with biases and clamped SwiGLU.

On disk the experts are fused and transposed, [E, in, out], or MXFP4 codes of [E, out, in]. Gate and up
alternate in both, and stay so in memory. unsloth's releases in bitsandbytes' 4 bits have each expert under
its own name and a router.linear.
Source: arXiv:2508.10925.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import llama, mixtral
from unfreeze.models.allowed import Fields, names
from unfreeze.models.layer_types import FULL, SLIDING, layer_types, mask
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

_MLP = "model.layers.{layer}.mlp."
RULES = (
    StackRule(_MLP + "experts.gate_up_proj", _MLP + "experts.gate_up_proj.weight", transposed=True),
    StackRule(_MLP + "experts.down_proj", _MLP + "experts.down_proj.weight", transposed=True),
    StackRule(_MLP + "router.{part}", _MLP + "gate.{part}"),
    StackRule(_MLP + "router.linear.{part}", _MLP + "gate.{part}"),
    *(
        rule
        for name in ("gate_up_proj", "down_proj")
        for rule in (
            StackRule(_MLP + f"experts.{name}_bias", _MLP + f"experts.{name}_bias"),
            StackRule(_MLP + f"experts.{name}s.{{expert}}.bias", _MLP + f"experts.{name}_bias", instead=True),
            *(
                StackRule(
                    _MLP + f"experts.{name}s.{{expert}}.{part}", _MLP + f"experts.{name}.{part}", instead=True
                )
                for part in ("weight", "weight_{part}")
            ),
        )
    ),
)
ignored = llama.ignored
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Default rotary table."""
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    read=names("layer_types"),
    null=names("num_key_value_heads"),
    only={
        "experts_per_token": lambda config: config["num_experts_per_tok"],
        "num_experts": lambda config: config["num_local_experts"],
    },
    silent=names("initial_context_length"),  # the rotary table repeats it
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: intermediate_size is an expert's; no layer is dense."""
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = {**config, "rope_scaling": YARN}
    kinds = layer_types(config, lambda index: FULL if index % 2 else SLIDING)
    return replace(llama.shape(config), family="gpt_oss", moe=mixtral.moe_shape(config), layer_types=kinds)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    from unfreeze.kernels.expert_mlp import ClampedSwiGLU
    from unfreeze.models.blocks.experts import BiasedExperts
    from unfreeze.models.blocks.moe import MoE
    from unfreeze.models.blocks.routers import LinearRouter, RoutingRule

    assert shape.moe is not None
    bias, config = bool(shape.config["attention_bias"]), shape.config
    sees = mask(shape, index)
    sinks = make.vector(shape.num_heads)
    attention = llama.attention(shape, index, make, qkv_bias=bias, output_bias=bias, mask=sees, sinks=sinks)
    gate = make.router(shape, RoutingRule(normalize=True), LinearRouter)
    activation = ClampedSwiGLU(
        interleaved=True, alpha=float(config["swiglu_alpha"]), limit=float(config["swiglu_limit"])
    )
    experts = make.experts_of(shape, f"model.layers.{index}.mlp", kind=BiasedExperts, activation=activation)
    mlp = MoE(index, gate=gate, experts=experts, shared_experts=None)
    return llama.block(shape, attention, mlp, make)
