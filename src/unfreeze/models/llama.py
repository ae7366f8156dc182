"""Llama (2, 3.x): grouped-query attention and the pre-norm block.

qwen2.py, qwen3.py and qwen3_moe.py build on both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models.allowed import Fields, names
from unfreeze.models.blocks.rope import rope_from_config
from unfreeze.models.shape import Shape, common, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.attention import Attention
    from unfreeze.models.blocks.bytes import Block
    from unfreeze.models.blocks.norm import RMSNorm
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = ()
ABSENT = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False}
"""Defaults shared by Llama's, Qwen2's, Qwen3's and Qwen3-MoE's config classes."""
FIELDS = Fields(
    absent={**ABSENT, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    read=names("num_key_value_heads head_dim"),
)


def ignored(shape: Shape) -> tuple[str, ...]:
    """The rotary table that old exports carry; here it is computed from config.json."""
    return (r".*rotary_emb\.inv_freq",)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    head_dim = int(
        config.get("head_dim") or require(config, "hidden_size") // require(config, "num_attention_heads")
    )
    return common(config, family="llama", rope=rope_from_config(config, head_dim), head_dim=head_dim)


def refuse_sized_tables(shape: Shape) -> None:
    """Raise CheckpointError for yarn where q and k are normed after they turn: that takes its factor away."""
    if shape.rope.attention_factor != 1:
        raise CheckpointError(
            f"config.json: {shape.model_type} with rotary tables of another size than 1 (yarn) is not built",
            next="open an issue with the model's name",
        )


def attention(
    shape: Shape,
    index: int,
    make: Factory,
    *,
    qkv_bias: bool,
    output_bias: bool,
    qk_norm: bool = False,
    norm: type[RMSNorm] | None = None,
    module: str = "self_attn",
    **parts: Any,
) -> Attention:
    """Grouped-query attention; with `qk_norm` an RMSNorm per head on q and k (Qwen3).

    norm: the class of that norm. module: the attention's name in a layer. parts: further arguments of
    Attention, such as pairs="adjacent", a scale, a mask.
    """
    from unfreeze.models.blocks.attention import Attention

    kind = () if norm is None else (norm,)
    name, hidden, width = f"model.layers.{index}.{module}", shape.hidden_size, shape.head_dim
    return Attention(
        index,
        width,
        q_proj=make.linear(f"{name}.q_proj", hidden, shape.num_heads * width, bias=qkv_bias),
        k_proj=make.linear(f"{name}.k_proj", hidden, shape.num_kv_heads * width, bias=qkv_bias),
        v_proj=make.linear(f"{name}.v_proj", hidden, shape.num_kv_heads * width, bias=qkv_bias),
        o_proj=make.linear(f"{name}.o_proj", shape.num_heads * width, hidden, bias=output_bias),
        q_norm=make.norm(width, shape.rms_norm_eps, *kind) if qk_norm else None,
        k_norm=make.norm(width, shape.rms_norm_eps, *kind) if qk_norm else None,
        **parts,
    )


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`. The config sets its biases (attention_bias, mlp_bias)."""
    bias = bool(shape.config["attention_bias"])
    mlp = make.mlp(
        f"model.layers.{index}.mlp",
        shape.hidden_size,
        shape.intermediate_size,
        bias=bool(shape.config["mlp_bias"]),
    )
    return block(shape, attention(shape, index, make, qkv_bias=bias, output_bias=bias), mlp, make)


def block(shape: Shape, self_attn: Block, mlp: Block, make: Factory) -> Layer:
    """The pre-norm block around an attention and an MLP."""
    from unfreeze.models.layer import Layer

    return Layer(
        self_attn=self_attn,
        mlp=mlp,
        input_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps),
        post_attention_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps),
    )
