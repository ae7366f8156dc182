"""L3, one file per model family. `shape` reads config.json, `build` makes the modules, `rules` maps checkpoint names to parameters.

To add a family: a file with RULES, ignored, shape and layer, one line in FAMILIES, and a test against transformers in tests/models.
Module and parameter names are the checkpoint's own; routed experts are stacked (see deepseek_v3.RULES).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.core.errors import CheckpointError, nearest
from unfreeze.models import deepseek_v3, llama, qwen2, qwen3, qwen3_moe
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.decoder import THROUGH, Body, Decoder, Embedding, Layer, elementwise, plain, recompute, selective, through
from unfreeze.models.factory import Factory, nothing_packed
from unfreeze.models.fields import check_fields, check_sizes, without_nulls
from unfreeze.models.init import initialize
from unfreeze.models.shape import Shape
from unfreeze.quant.codec import Codec

__all__ = [
    "FAMILIES", "THROUGH", "Decoder", "Layer", "Shape", "build", "elementwise", "ignored", "initialize", "plain", "recompute", "rules", "selective",
    "shape", "through", "tied",
]  # fmt: skip

FAMILIES: dict[str, ModuleType] = {
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def _family(config: Mapping[str, Any]) -> ModuleType:
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not built; built: {', '.join(FAMILIES)}{nearest(model_type, FAMILIES)}",
            next="see CONTRIBUTING.md, 'to add a model family'",
        )
    return FAMILIES[model_type]


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes of the language model in a config.json (its `text_config` where there is one, as in Kimi-K2.5).

    Raises CheckpointError naming the field that is missing, of another type, out of range, or doesn't fit another (models/fields.py).
    """
    text = config.get("text_config")
    config = without_nulls(text if isinstance(text, Mapping) else config)
    family = _family(config)
    check_fields(config)
    shape = family.shape(config)
    check_sizes(shape)
    return shape


def build(
    shape: Shape, *, dtype: Any, device: Any = "meta", codec: Codec | None = None, packed: Callable[[str], bool] = nothing_packed
) -> Decoder:
    """A Decoder with uninitialised weights: on "meta" it takes no memory; parallel.place fills it, initialize() draws it at random.

    `packed(module name)` says which modules the checkpoint stores in `codec`'s format; they stay so.
    """
    make = Factory(dtype, device, codec, packed)
    layers = [FAMILIES[shape.model_type].layer(shape, index, make) for index in range(shape.num_layers)]
    body = Body(
        Embedding(shape.vocab_size, shape.hidden_size, dtype=dtype, device=device),
        layers,
        make.norm(shape.hidden_size, shape.rms_norm_eps),
    )
    lm_head = Linear(shape.hidden_size, shape.vocab_size, codec=make.codec_for("lm_head"), dtype=dtype, device=device)
    if shape.tied:
        lm_head.weight = body.embed_tokens.weight
    return Decoder(shape, body, lm_head)


def rules(shape: Shape) -> Sequence[StackRule]:
    """How the experts' tensors on disk are stacked in memory."""
    return FAMILIES[shape.model_type].RULES


def ignored(shape: Shape) -> Sequence[str]:
    """Regular expressions of checkpoint names that are not part of this language model."""
    return FAMILIES[shape.model_type].ignored(shape)


def tied(shape: Shape) -> Mapping[str, str]:
    """Parameter names that share another's memory: {"lm_head.weight": "model.embed_tokens.weight"} where the head is tied."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if shape.tied else {}
