"""Gemma 2: norms before and after attention and MLP, softcapped scores and logits, every other layer slides.

Source: arXiv:2408.00118. gemma3_text.py builds on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama
from unfreeze.models.allowed import Fields, names
from unfreeze.models.layer_types import FULL, SLIDING, layer_types, mask
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Ends, Factory
    from unfreeze.models.layer import SandwichLayer

RULES = llama.RULES
ignored = llama.ignored
GELU = "gelu_pytorch_tanh"
FIELDS = Fields(
    absent={
        **llama.ABSENT,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "hidden_activation": GELU,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    read=names("layer_types"),
    null=names("sliding_window final_logit_softcapping attn_logit_softcapping"),
    # hidden_act is an older name that transformers doesn't read
    only={"hidden_activation": lambda config: GELU, "hidden_act": lambda config: GELU},
    silent=names("cache_implementation"),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    kinds = layer_types(config, lambda index: FULL if index % 2 else SLIDING)
    softcap = config.get("final_logit_softcapping")
    return replace(llama.shape(config), family="gemma2", layer_types=kinds, softcap=softcap)


def ends(shape: Shape, make: Factory) -> Ends:
    """Embeddings scaled by sqrt(D), rounded to their dtype; a final norm with gain 1 + weight."""
    import torch

    from unfreeze.models.blocks.norm import OffsetRMSNorm
    from unfreeze.models.factory import Ends

    scale = float(torch.tensor(shape.hidden_size**0.5, dtype=make.dtype))
    norm = make.norm(shape.hidden_size, shape.rms_norm_eps, OffsetRMSNorm)
    return Ends(make.embedding(shape, scale), norm, make.head(shape))


def layer(shape: Shape, index: int, make: Factory, **parts: Any) -> SandwichLayer:
    """Decoder layer `index`. parts: options of its attention, for Gemma 3."""
    from unfreeze.models.blocks.nonlinearity import GATED_GELU
    from unfreeze.models.blocks.norm import OffsetRMSNorm
    from unfreeze.models.layer import SandwichLayer

    config, bias = shape.config, bool(shape.config["attention_bias"])
    attention = llama.attention(
        shape,
        index,
        make,
        qkv_bias=bias,
        output_bias=bias,
        norm=OffsetRMSNorm,
        scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        softcap=config.get("attn_logit_softcapping"),
        mask=mask(shape, index),
        **parts,
    )
    name = f"model.layers.{index}.mlp"
    mlp = make.mlp(name, shape.hidden_size, shape.intermediate_size, activation=GATED_GELU)
    norms = [make.norm(shape.hidden_size, shape.rms_norm_eps, OffsetRMSNorm) for _ in range(4)]
    return SandwichLayer(
        self_attn=attention,
        mlp=mlp,
        input_layernorm=norms[0],
        post_attention_layernorm=norms[1],
        pre_feedforward_layernorm=norms[2],
        post_feedforward_layernorm=norms[3],
    )
