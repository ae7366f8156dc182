"""MiMo-V2-Flash: values narrower than keys and scaled, windows with sinks, DeepSeek-V3's routing.

Sliding layers have twice the key heads of full ones, a rotary base of their own and a sink per head. No
shared experts. Module names on disk as in the release.
Source: transformers 5.23, models/mimo_v2_flash; the release's config.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import deepseek_v3, llama
from unfreeze.models.configs import mimo_v2_flash as config_json
from unfreeze.models.layer_types import FULL, SLIDING, mask
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

_SINKS = "model.layers.{layer}.self_attn."
RULES = (*deepseek_v3.RULES, StackRule(_SINKS + "attention_sink_bias", _SINKS + "sinks"))
FIELDS = config_json.FIELDS
shape = config_json.shape
SCALED_BY = ("ntk",)
"""Scalings that --rope-scaling may write: the release's own code reads no rope_scaling."""


def ignored(shape: Shape) -> tuple[str, ...]:
    """Multi-token prediction heads."""
    return (*llama.ignored(shape), r"(model\.)?mtp\..*")


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`: attention_bias sets biases on q, k and v; o_proj has none."""
    from unfreeze.models.blocks.attention import ScaledValueAttention
    from unfreeze.models.blocks.moe import MoE

    name, hidden, config = f"model.layers.{index}", shape.hidden_size, shape.config
    full, bias = shape.layer_types[index] == FULL, bool(config["attention_bias"])
    heads, groups = shape.num_heads, shape.num_kv_heads if full else 2 * shape.num_kv_heads
    width, value, scale = shape.head_dim, int(config["v_head_dim"]), config.get("attention_value_scale")

    def projection(part: str, size: int) -> Any:
        return make.linear(f"{name}.self_attn.{part}", hidden, size, bias=bias)

    attention = ScaledValueAttention(
        index,
        width,
        value_width=value,
        value_scale=1.0 if scale is None else float(scale),
        q_proj=projection("q_proj", heads * width),
        k_proj=projection("k_proj", groups * width),
        v_proj=projection("v_proj", groups * value),
        o_proj=make.linear(f"{name}.self_attn.o_proj", heads * value, hidden),
        rope="" if full else SLIDING,
        mask=mask(shape, index),
        sinks=None if full else make.vector(heads),
        pairs="leading halves",
    )
    if not shape.is_moe(index):
        mlp: Any = make.mlp(f"{name}.mlp", hidden, shape.intermediate_size)
    else:
        gate = deepseek_v3.router(shape, make)
        mlp = MoE(index, gate=gate, experts=make.experts_of(shape, f"{name}.mlp"), shared_experts=None)
    return llama.block(shape, attention, mlp, make)
