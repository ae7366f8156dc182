"""LFM2: short convolutions between two gates, and attention in some layers.

Source: the model card of LFM2-1.2B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import llama
from unfreeze.models.configs import lfm2 as config_json
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.attention import Attention
    from unfreeze.models.blocks.bytes import Block
    from unfreeze.models.blocks.gated_conv import GatedConv
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

NAMES = (
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
)
"""(ours, the release's) within a layer."""
_LAYER = "model.layers.{layer}."
RULES = (
    StackRule("model.embedding_norm.{part}", "model.norm.{part}"),
    *(StackRule(f"{_LAYER}{theirs}.{{part}}", f"{_LAYER}{ours}.{{part}}") for ours, theirs in NAMES),
)
RENAMED: tuple[tuple[str, str], ...] = NAMES[:4]
ignored = llama.ignored
FIELDS = config_json.FIELDS
shape = config_json.shape


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    mlp = make.mlp(f"model.layers.{index}.mlp", shape.hidden_size, shape.intermediate_size)
    return block(shape, index, make, mlp)


def block(shape: Shape, index: int, make: Factory, mlp: Block) -> Layer:
    """The pre-norm block around a convolution or attention."""
    from unfreeze.models.layer import Layer

    conv = shape.layer_types[index] == config_json.CONV
    return Layer(
        self_attn=gated_conv(shape, index, make) if conv else attention(shape, index, make),
        mlp=mlp,
        input_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps),
        post_attention_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps),
        name="conv" if conv else "self_attn",
    )


def attention(shape: Shape, index: int, make: Factory) -> Attention:
    """GQA with norms of q and k, without biases."""
    return llama.attention(shape, index, make, qkv_bias=False, output_bias=False, qk_norm=True)


def gated_conv(shape: Shape, index: int, make: Factory) -> GatedConv:
    """A convolution of conv_L_cache taps between two gates."""
    from unfreeze.models.blocks.gated_conv import GatedConv

    name, D = f"model.layers.{index}.conv", shape.hidden_size
    taps, bias = int(shape.config["conv_L_cache"]), bool(shape.config["conv_bias"])
    return GatedConv(
        index,
        in_proj=make.linear(f"{name}.in_proj", D, 3 * D, bias=bias),
        conv=make.short_conv(D, taps, silu=False, bias=bias),
        out_proj=make.linear(f"{name}.out_proj", D, D, bias=bias),
    )
