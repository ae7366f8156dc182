"""nanochat: norms without weights, one of them after the embeddings; relu squared; softcapped logits.

transformers rotates q and k by minus the angle, then norms them. A norm without a weight commutes with a
rotation, so here they are normed first.
Source: github.com/karpathy/nanochat, as transformers reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Ends, Factory
    from unfreeze.models.layer import Layer

RULES = llama.RULES
ignored = llama.ignored
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "hidden_act": "relu2",
        "final_logit_softcapping": 15.0,
    },
    read=names("num_key_value_heads head_dim"),
    null=names("num_key_value_heads final_logit_softcapping"),
    only={"hidden_act": lambda config: "relu2"},
)

SCALED_BY = ("linear", "ntk")


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    sizes = llama.shape(config)
    llama.refuse_sized_tables(sizes)  # q and k are normed after they turn, here before
    softcap = config.get("final_logit_softcapping")
    return replace(sizes, family="nanochat", rope=sizes.rope.backwards(), softcap=softcap)


def ends(shape: Shape, make: Factory) -> Ends:
    """Embeddings normed without a weight; the final norm has no weight either."""
    from unfreeze.models.blocks.embedding import NormedEmbedding
    from unfreeze.models.blocks.norm import PlainRMSNorm
    from unfreeze.models.factory import Ends

    norm = make.norm(shape.hidden_size, shape.rms_norm_eps, PlainRMSNorm)
    table = NormedEmbedding(shape.vocab_size, shape.hidden_size, norm, **make.table)
    return Ends(table, norm, make.head(shape))


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    from unfreeze.models.blocks.mlp import PlainMLP
    from unfreeze.models.blocks.nonlinearity import SQUARED_RELU
    from unfreeze.models.blocks.norm import PlainRMSNorm
    from unfreeze.models.layer import Layer

    name, bias = f"model.layers.{index}.mlp", bool(shape.config["attention_bias"])
    mlp = PlainMLP(
        fc1=make.linear(f"{name}.fc1", shape.hidden_size, shape.intermediate_size),
        fc2=make.linear(f"{name}.fc2", shape.intermediate_size, shape.hidden_size),
        activation=SQUARED_RELU,
    )
    attention = llama.attention(
        shape, index, make, qkv_bias=bias, output_bias=bias, qk_norm=True, norm=PlainRMSNorm
    )
    return Layer(
        self_attn=attention,
        mlp=mlp,
        input_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps, PlainRMSNorm),
        post_attention_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps, PlainRMSNorm),
    )
