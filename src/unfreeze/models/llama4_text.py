"""The text part of Llama 4: chunked attention; every fourth layer has full attention and no rotation.

A token's routing weight scales its expert's input, not its output; a shared expert sees every token.
Source: Meta's release and its reference; the temperature of layers without rotation: arXiv:2501.19399.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import deepseek_v3, llama
from unfreeze.models.configs import llama4_text as config_json
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.mlp import MLP
    from unfreeze.models.blocks.moe import MoE
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

_DISK, _OURS = "model.layers.{layer}.feed_forward.", "model.layers.{layer}.mlp."
RULES = (
    StackRule(_DISK + "experts.gate_up_proj", _OURS + "experts.gate_up_proj.weight", transposed=True),
    StackRule(_DISK + "experts.down_proj", _OURS + "experts.down_proj.weight", transposed=True),
    *(replace(rule, disk=rule.disk.replace(".mlp.", ".feed_forward.")) for rule in deepseek_v3.QUANTIZED),
    StackRule(_DISK + "router.weight", _OURS + "gate.weight"),
    StackRule(_DISK + "shared_expert.{which}.{part}", _OURS + "shared_experts.{which}.{part}"),
    StackRule(_DISK + "{which}.{part}", _OURS + "{which}.{part}"),
)
RENAMED = (("shared_experts.", "shared_expert."), ("mlp.", "feed_forward."))
PEFT_SWAPS = (
    True  # transformers' class does not set is_transposed, so peft reads its [E, in, out] as [E, out, in]
)
ignored = llama.ignored
FIELDS = config_json.FIELDS
shape = config_json.shape


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`.

    The norm of q and k has no weight, so it may come before the rotation: the result is the same.
    """
    from unfreeze.kernels.attention import CAUSAL, Mask
    from unfreeze.models.blocks.norm import PlainRMSNorm

    config, rotates = shape.config, config_json.rotates(shape.config)[index]
    chunked = shape.layer_types[index] == config_json.CHUNKED
    bias = bool(config["attention_bias"])
    attention = llama.attention(
        shape,
        index,
        make,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=bool(config["use_qk_norm"]) and rotates,
        norm=PlainRMSNorm,
        pairs="adjacent" if rotates else "halves",
        rope="" if rotates else None,
        query_rope=None if rotates else config_json.TEMPERATURE,
        mask=Mask(chunk=int(config["attention_chunk_size"])) if chunked else CAUSAL,
    )
    return llama.block(shape, attention, _mlp(shape, index, make), make)


def _mlp(shape: Shape, index: int, make: Factory) -> MLP | MoE:
    from unfreeze.models.blocks.moe import InputScaledMoE
    from unfreeze.models.blocks.routers import RoutingRule

    name, moe = f"model.layers.{index}.mlp", shape.moe
    assert moe is not None
    if not shape.is_moe(index):
        return make.mlp(name, shape.hidden_size, int(shape.config["intermediate_size_mlp"]))
    gate = make.router(shape, RoutingRule("logits", after=True))
    return InputScaledMoE(
        index,
        gate=gate,
        experts=make.experts_of(shape, name),
        shared_experts=make.mlp(f"{name}.shared_experts", shape.hidden_size, moe.intermediate_size),
    )
