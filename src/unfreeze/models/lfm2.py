"""LFM2: short convolutions between two gates, and attention in some layers.

Source: the model card of LFM2-1.2B.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.core.errors import CheckpointError
from unfreeze.models import llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.fields import NEXT
from unfreeze.models.layer_types import FULL, layer_types
from unfreeze.models.shape import Shape, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.attention import Attention
    from unfreeze.models.blocks.bytes import Block
    from unfreeze.models.blocks.gated_conv import GatedConv
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

CONV = "conv"
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
ABSENT: Mapping[str, Any] = {
    "norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128000,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "conv_bias": False,
    "conv_L_cache": 3,
}
FIELDS = Fields(
    absent={
        **ABSENT,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    read=names("layer_types full_attn_idxs block_ff_dim tie_embedding"),
    null=names("block_ffn_dim_multiplier"),
    only={
        "block_dim": lambda config: config.get("hidden_size"),
        "conv_dim": lambda config: config.get("hidden_size"),
        "conv_dim_out": lambda config: config.get("hidden_size"),
        "num_heads": lambda config: config.get("num_attention_heads"),
        "block_norm_eps": lambda config: config["norm_eps"],
        "block_use_swiglu": lambda config: True,
        "use_pos_enc": lambda config: True,
    },
    silent=names("block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init"),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: layers of full_attn_idxs have attention, all if it is absent.

    Raises CheckpointError for full_attn_idxs and layer_types that differ.
    """
    layers, indices = int(require(config, "num_hidden_layers")), config.get("full_attn_idxs")
    full = range(layers) if indices is None else indices
    if max(full, default=0) >= layers:
        raise CheckpointError(
            f"config.json: full_attn_idxs holds {max(full):,}, and layers are numbered 0 to {layers - 1:,}",
            next=NEXT,
        )
    sizes = sized({**config, "intermediate_size": mlp_width(config)}, full)
    if indices is not None and {i for i, kind in enumerate(sizes.layer_types) if kind == FULL} != {*full}:
        raise CheckpointError("config.json: full_attn_idxs and layer_types differ", next=NEXT)
    return sizes


def sized(config: Mapping[str, Any], full: Collection[int]) -> Shape:
    """Sizes from config.json, without experts; `full`: the layers with attention if layer_types is absent."""
    config = {
        **config,
        "rms_norm_eps": config["norm_eps"],
        "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"]),
    }
    kinds = layer_types(config, lambda index: FULL if index in full else CONV, (FULL, CONV))
    return replace(llama.shape(config), family="lfm2", layer_types=kinds)


def mlp_width(config: Mapping[str, Any]) -> int:
    """Width of the MLPs: block_ff_dim or intermediate_size; adjusted, 2/3 of it, rounded up to a multiple.

    As transformers' Lfm2MLP: floor(multiplier · floor(2/3 · width)), then up to block_multiple_of.
    """
    width = int(config.get("block_ff_dim") or require(config, "intermediate_size"))
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width, factor, multiple = (
        int(2 * width / 3),
        config["block_ffn_dim_multiplier"],
        config["block_multiple_of"],
    )
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    mlp = make.mlp(f"model.layers.{index}.mlp", shape.hidden_size, shape.intermediate_size)
    return block(shape, index, make, mlp)


def block(shape: Shape, index: int, make: Factory, mlp: Block) -> Layer:
    """The pre-norm block around a convolution or attention."""
    from unfreeze.models.layer import Layer

    conv = shape.layer_types[index] == CONV
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
