"""Granite 3: a Llama block with four multipliers: on embeddings, attention scores, residuals and logits.

Source: the Granite 3.0 report and its published config.json; the multipliers are those of arXiv:2203.03466.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.bytes import Block
    from unfreeze.models.factory import Ends, Factory
    from unfreeze.models.layer import ScaledLayer

RULES = llama.RULES
ignored = llama.ignored
MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        **MULTIPLIERS,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
    },
    read=names("num_key_value_heads"),
    null=names("num_key_value_heads"),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    return replace(llama.shape(config), family="granite")


def ends(shape: Shape, make: Factory) -> Ends:
    """Embeddings times embedding_multiplier; logits divided by logits_scaling."""
    from unfreeze.models.factory import Ends

    return Ends(
        make.embedding(shape, float(shape.config["embedding_multiplier"])),
        make.norm(shape.hidden_size, shape.rms_norm_eps),
        make.head(shape, 1 / float(shape.config["logits_scaling"])),
    )


def layer(shape: Shape, index: int, make: Factory) -> ScaledLayer:
    """Decoder layer `index`."""
    mlp = make.mlp(
        f"model.layers.{index}.mlp",
        shape.hidden_size,
        shape.intermediate_size,
        bias=bool(shape.config["mlp_bias"]),
    )
    return block(shape, index, mlp, make)


def block(shape: Shape, index: int, mlp: Block, make: Factory) -> ScaledLayer:
    """The scaled residual block around Granite's attention and an MLP."""
    from unfreeze.models.layer import ScaledLayer

    bias, scale = bool(shape.config["attention_bias"]), float(shape.config["attention_multiplier"])
    return ScaledLayer(
        float(shape.config["residual_multiplier"]),
        self_attn=llama.attention(shape, index, make, qkv_bias=bias, output_bias=bias, scale=scale),
        mlp=mlp,
        input_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps),
        post_attention_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps),
    )
