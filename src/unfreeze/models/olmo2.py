"""OLMo 2: norms after attention and MLP, and on the whole of q and k. Source: arXiv:2501.00656."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.attention import WideNormAttention
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import PostNormLayer

RULES = llama.RULES
ignored = llama.ignored
FIELDS = Fields(
    absent={**llama.ABSENT, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False},
    read=names("num_key_value_heads head_dim"),
    null=names("num_key_value_heads"),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    return replace(llama.shape(config), family="olmo2")


def layer(shape: Shape, index: int, make: Factory, **parts: Any) -> PostNormLayer:
    """Decoder layer `index`. parts: options of its attention, for OLMo 3."""
    from unfreeze.models.layer import PostNormLayer

    hidden, bias = shape.hidden_size, bool(shape.config["attention_bias"])
    return PostNormLayer(
        self_attn=attention(shape, index, make, bias=bias, **parts),
        mlp=make.mlp(f"model.layers.{index}.mlp", hidden, shape.intermediate_size),
        post_attention_layernorm=make.norm(hidden, shape.rms_norm_eps),
        post_feedforward_layernorm=make.norm(hidden, shape.rms_norm_eps),
    )


def attention(shape: Shape, index: int, make: Factory, *, bias: bool, **parts: Any) -> WideNormAttention:
    """Grouped-query attention with an RMSNorm over all heads of q, and one over all heads of k."""
    from unfreeze.models.blocks.attention import WideNormAttention

    name, hidden = f"model.layers.{index}.self_attn", shape.hidden_size
    query, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return WideNormAttention(
        index,
        shape.head_dim,
        q_proj=make.linear(f"{name}.q_proj", hidden, query, bias=bias),
        k_proj=make.linear(f"{name}.k_proj", hidden, keys, bias=bias),
        v_proj=make.linear(f"{name}.v_proj", hidden, keys, bias=bias),
        o_proj=make.linear(f"{name}.o_proj", query, hidden, bias=bias),
        q_norm=make.norm(query, shape.rms_norm_eps),
        k_norm=make.norm(keys, shape.rms_norm_eps),
        **parts,
    )
