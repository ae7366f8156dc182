"""The model families, one file each (layer 4).

`shape` reads config.json, `build` makes the modules, `rules` maps checkpoint names to parameters. The code
that makes modules is imported on first use, so a config can be refused without importing torch. To add a
family: CONTRIBUTING.md, "Add a model family".

A family's file has at most 120 lines: RULES, FIELDS, `shape`, `layer`. If they don't fit, FIELDS and `shape`,
all that reads config.json, are in configs/<family>.py. Parts are in blocks/, mamba.py and mla.py.

Module and parameter names are the checkpoint's own; routed experts are stacked (see deepseek_v3.RULES).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.core.errors import CheckpointError, printable
from unfreeze.core.lazy import on_first_use
from unfreeze.models import (
    chain_of_experts,
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    ernie4_5_moe,
    gemma2,
    gemma3_text,
    gemma4_text,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    granite,
    granitemoe,
    granitemoehybrid,
    kimi_linear,
    lfm2,
    lfm2_moe,
    llama,
    llama4_text,
    mimo_v2_flash,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    nanochat,
    nemotron_h,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    qwen3_vl_moe_text,
    qwen3_vl_text,
    seed_oss,
    smollm3,
)
from unfreeze.models.allowed import Fields, refuse_unbuilt, unknown
from unfreeze.models.fields import check_fields, check_sizes, without_nulls
from unfreeze.models.parts import ASSEMBLED, placed
from unfreeze.models.shape import Shape
from unfreeze.models.unbuilt import missing, nearest_family, unbuilt_parts
from unfreeze.models.wrappers import WRAPPERS
from unfreeze.quant import formats

if TYPE_CHECKING:
    from unfreeze.models.decoder import Decoder
    from unfreeze.models.factory import build, from_config, meta_model
    from unfreeze.models.init import initialize
    from unfreeze.models.layer import Layer
    from unfreeze.models.recompute import (
        RECOMPUTE,
        elementwise,
        keep_inputs,
        plain,
        recompute_policy,
        selective,
    )

__all__ = [
    "FAMILIES",
    "ONLY_HERE",
    "RECOMPUTE",
    "WRAPPERS",
    "Decoder",
    "Layer",
    "Shape",
    "beside",
    "build",
    "elementwise",
    "from_config",
    "ignored",
    "initialize",
    "keep_inputs",
    "meta_model",
    "not_followed",
    "notes",
    "plain",
    "recompute_policy",
    "renamed",
    "rules",
    "selective",
    "shape",
    "swapped_by_peft",
    "tied",
]

FAMILIES: dict[str, ModuleType] = {
    "chain_of_experts": chain_of_experts,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "deepseek_v4": deepseek_v4,
    "ernie4_5_moe": ernie4_5_moe,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gemma4_text": gemma4_text,
    "glm4_moe": glm4_moe,
    "glm_moe_dsa": glm_moe_dsa,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "granitemoe": granitemoe,
    "granitemoehybrid": granitemoehybrid,
    "kimi_k2": deepseek_v3,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "llama": llama,
    "llama4_text": llama4_text,
    "mimo_v2_flash": mimo_v2_flash,
    "minimax_m2": minimax_m2,
    "ministral": ministral,
    "ministral3": ministral3,
    "mistral": mistral,
    "mistral4": mistral4,
    "mixtral": mixtral,
    "nanochat": nanochat,
    "nemotron_h": nemotron_h,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_vl_moe_text": qwen3_vl_moe_text,
    "qwen3_vl_text": qwen3_vl_text,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
}

ONLY_HERE = frozenset(("chain_of_experts", ASSEMBLED))
"""Model types of this project: no other program loads them."""


def _family(config: Mapping[str, Any]) -> ModuleType:
    model_type = config.get("model_type")
    return (
        FAMILIES[model_type]
        if isinstance(model_type, str) and model_type in FAMILIES
        else _not_built(config, model_type)
    )


def _not_built(config: Mapping[str, Any], model_type: object, beside: str = "") -> NoReturn:
    """Raise the error for a model_type without a family: name the missing part and the nearest family.

    'deepseek_v32' and 'kimi_k3' are other models: with model_type edited to the nearest name they would load
    and compute something else. Nearest means by fields, not by name, and the message says that it computes
    something else.
    """
    if isinstance(model_type, str) and model_type in WRAPPERS and not beside:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} has no text_config, its language model",
            next="get config.json from the model's publisher again",
        )
    if model_type is None:
        raise CheckpointError(
            "config.json has no model_type", next="get config.json from the model's publisher again"
        )
    parts = missing(config)
    what = f": {parts}" if parts else " is not built"
    raise CheckpointError(
        f"config.json: model_type {str(model_type)!r}{beside}{what}; {len(FAMILIES)} families are"
        " (docs/reference/families.md)",
        next=f"take a release of one of them; or see CONTRIBUTING.md, 'Add a model family'{_near(config)}",
    )


def _near(config: Mapping[str, Any]) -> str:
    """Return "; its fields are nearest to …", a starting point; "" if too few fields match."""
    text = config.get("text_config")
    fields = {kind: family.FIELDS.read | family.FIELDS.absent.keys() for kind, family in FAMILIES.items()}
    nearest = nearest_family(text if isinstance(text, Mapping) else config, fields)
    return f"; its fields resemble {nearest!r} most, but that computes something else" if nearest else ""


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config.json: its text_config, or all of it.

    Raises CheckpointError for a wrapper that WRAPPERS does not list, and for one that contradicts its
    text_config.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    outer = str(config.get("model_type"))
    if outer in WRAPPERS and text.get("model_type") is None:
        text = {**text, "model_type": WRAPPERS[outer].text}
    inner = str(text.get("model_type"))
    if outer not in WRAPPERS and (inner not in FAMILIES or unbuilt_parts(without_nulls(text))):
        return _not_built(config, outer, f" (its text part: {inner!r})")
    if outer not in WRAPPERS:
        raise CheckpointError(
            f"config.json: model_type {outer!r} around a text_config is not built, though its text part"
            f" {inner!r} is. Known around a text_config: {', '.join(WRAPPERS)}",
            next="give the text model's own release; or see CONTRIBUTING.md, 'Add a model family'",
        )
    for name in ("tie_word_embeddings", "quantization_config"):
        if config.get(name) is not None and text.get(name) is not None and config[name] != text[name]:
            raise CheckpointError(
                f"config.json: {name} and text_config.{name} differ",
                next="keep the one that is the publisher's",
            )
    refuse_unbuilt(without_nulls(_outer(config)), Fields({}))
    return {
        **{name: config[name] for name in ("tie_word_embeddings",) if config.get(name) is not None},
        **text,
    }


def not_followed(config: Mapping[str, object]) -> str:
    """Return one line that names every field of config.json that is neither read nor known to have no effect.

    Returns "" if there is none.
    """
    config = _bare(config)
    text = _text(config)
    fields = unknown(text, _family(text).FIELDS)
    if text is not config:
        fields += [f"{field} (outside text_config)" for field in unknown(_outer(config), Fields({}))]
    return f"config.json: {', '.join(fields)}: unknown and ignored" if fields else ""


def notes(config: Mapping[str, object]) -> list[str]:
    """List the ignored fields of config.json and quantization_config, and the tensors beside the model."""
    lines = (not_followed(config), formats.not_followed(config), beside(config))
    return [printable(line) for line in lines if line]


def beside(config: Mapping[str, object]) -> str:
    """Return the line on a config around a text_config; "" for others."""
    config = _bare(config)
    if _text(config) is config:
        return ""
    return f"model_type {config['model_type']!r}: its language model trains; other tensors stay as they are"


def _outer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields around a text_config that may affect the text model."""
    silent = WRAPPERS[str(config["model_type"])].silent
    return {name: value for name, value in config.items() if name not in silent}


def _bare(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the family itself, of a model with other parts (parts/); any other as it is."""
    if config.get("model_type") != ASSEMBLED:
        return config
    own = {name: value for name, value in config.items() if name not in ("parts", "base_model_type")}
    if not isinstance(config.get("parts"), list) or not isinstance(config.get("base_model_type"), str):
        raise CheckpointError(
            f"config.json: model_type {ASSEMBLED!r} needs base_model_type, a text, and parts, a list",
            next="make the model again: unfreeze swap",
        )
    return {**own, "model_type": config["base_model_type"]}


def shape(config: Mapping[str, Any]) -> Shape:
    """Read the language model's sizes from config.json (in `text_config` if it has one, as in Kimi-K2.5).

    Raises CheckpointError naming the field that is missing, has the wrong type, is out of range, or does not
    fit another (models/fields.py).
    """
    bare = _bare(config)
    own = _shape(bare)
    return own if bare is config else replace(own, parts=placed(config["parts"], own.num_layers))


def _shape(config: Mapping[str, Any]) -> Shape:
    text = _text(config)
    present = without_nulls(text)
    family = _family(present)
    check_fields(present)
    unread = {
        name: present[name] for name in present.keys() - family.FIELDS.read - family.FIELDS.absent.keys()
    }
    if unbuilt_parts(unread):
        _not_built(present, present["model_type"])
    completed = family.FIELDS.completed(text, present, nested=text is not config)
    refuse_unbuilt(completed, family.FIELDS)
    shape = family.shape(completed)
    check_sizes(shape)
    return shape if text is config else replace(shape, wrapper=str(config["model_type"]))


def rules(shape: Shape) -> Sequence[StackRule]:
    """Return the rules that stack the experts' tensors on disk into tensors in memory."""
    return FAMILIES[shape.model_type].RULES


def ignored(shape: Shape) -> Sequence[str]:
    """Regular expressions of checkpoint names that are not part of this language model."""
    beside = WRAPPERS[shape.wrapper].beside if shape.wrapper else ()
    return (*FAMILIES[shape.model_type].ignored(shape), *beside)


def renamed(shape: Shape) -> tuple[tuple[str, str], ...]:
    """Return (our name, transformers' name) for parts of module names where the family's differ."""
    family = FAMILIES[shape.model_type]
    return family.renamed(shape) if hasattr(family, "renamed") else getattr(family, "RENAMED", ())


def swapped_by_peft(shape: Shape) -> bool:
    """True if peft swaps in_features and out_features of fused experts (the family's PEFT_SWAPS says why)."""
    return getattr(FAMILIES[shape.model_type], "PEFT_SWAPS", False)


def tied(shape: Shape) -> Mapping[str, str]:
    """Parameter names that share another parameter's memory.

    {"lm_head.weight": "model.embed_tokens.weight"} if the head is tied.
    """
    return {"lm_head.weight": "model.embed_tokens.weight"} if shape.tied else {}


__getattr__ = on_first_use(
    __name__,
    {
        "Decoder": "unfreeze.models.decoder",
        "Layer": "unfreeze.models.layer",
        "initialize": "unfreeze.models.init",
        **dict.fromkeys(("build", "from_config", "meta_model"), "unfreeze.models.factory"),
        **dict.fromkeys(
            ("RECOMPUTE", "elementwise", "keep_inputs", "plain", "recompute_policy", "selective"),
            "unfreeze.models.recompute",
        ),
    },
)
