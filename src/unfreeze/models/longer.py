"""A config.json for more positions than its model was trained on: rotary frequencies scaled by a factor s.

yarn    low frequencies / s, high ones kept, a ramp between (Peng et al. 2023, arXiv:2309.00071)
linear  all frequencies / s (Chen et al. 2023, arXiv:2306.15595)
ntk     theta · s^(R / (R - 2)) in place of theta, R the rotary width: the highest frequency stays, the
        lowest is divided by s (bloc97 2023; section 3.1 of arXiv:2309.00071)

Both spellings are written, rope_parameters for transformers 5 and rope_theta with rope_scaling for earlier
versions, vLLM and SGLang. A family with a table per kind of layer is scaled in its full layers: sliding ones
never see more than their window.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.core.errors import ConfigError
from unfreeze.core.longer import SCALINGS, Longer
from unfreeze.models.blocks.rope import rope_parameters
from unfreeze.models.layer_types import FULL, SLIDING
from unfreeze.models.shape import Shape

OWN = ("rope_type", "type", "rope_theta")  # fields of a rotary table that are written anew
LOCAL = "rope_local_base_freq"  # Gemma 3's theta of sliding layers, as earlier versions read it
PARTIAL = "partial_rotary_factor"
WRITTEN = (
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", LOCAL, PARTIAL),
    "head_dim",
)


def lengthened(manifest: Manifest, longer: Longer | None) -> Manifest:
    """The checkpoint with a config.json for `longer.factor` times its positions; unchanged for None.

    Raises ConfigError if the model's rotary frequencies cannot be scaled so.
    """
    if longer is None:
        return manifest
    return replace(manifest, config=config_for(manifest.config, longer), longer=longer)


def config_for(config: Mapping[str, Any], longer: Longer) -> dict[str, Any]:
    """config.json for `longer.factor` times the positions.

    Raises ConfigError for frequencies that are scaled already (state: type and numbers), and for a family
    whose programs read no such scaling.
    """
    shape = models.shape(config)
    _refuse(shape, longer)
    written = copy.deepcopy(dict(config))
    inner = written.get("text_config")
    text: dict[str, Any] = inner if isinstance(inner, dict) else written
    computed = shape.rope.computed
    assert computed is not None  # _refuse has looked

    # the table of full layers: what it holds beside the scaling (mrope_section …) stays
    new, old = (dict(text.get(name) or {}) for name in ("rope_parameters", "rope_scaling"))
    family = models.FAMILIES[shape.model_type]
    kinds = family.FIELDS.per_kind
    before = old | (new.get(FULL) or {} if kinds else new)
    theta, s = computed.theta, float(longer.factor)
    scaled: dict[str, Any] = {"rope_type": longer.scaling, "factor": s}
    if longer.scaling == "yarn":
        scaled["original_max_position_embeddings"] = shape.max_positions
    if longer.scaling == "ntk":
        theta, scaled = theta * s ** (computed.width / (computed.width - 2)), {"rope_type": "default"}
    kept = {key: value for key, value in before.items() if key not in OWN}
    table = {**kept, **scaled, "rope_theta": theta}

    # both spellings, and the new number of positions
    text["max_position_embeddings"] = int(shape.max_positions * longer.factor)
    text["rope_theta"] = theta
    text["rope_parameters"] = {FULL: table, SLIDING: _local(shape)} if kinds else table
    text["rope_scaling"] = {key: value for key, value in table.items() if key != "rope_theta"}
    text["rope_scaling"]["type"] = scaled["rope_type"]
    if longer.scaling == "ntk" and not kept.keys() - {PARTIAL}:
        del text["rope_scaling"]  # earlier versions know no type "default" of some families
    if PARTIAL in kept:
        text[PARTIAL] = kept[PARTIAL]
    if longer.scaling == "yarn" and "head_dim" in family.FIELDS.read and not text.get("head_dim"):
        text["head_dim"] = shape.head_dim  # transformers 5.23 cannot compute yarn of a null (Mixtral)
    if LOCAL in family.FIELDS.read | family.FIELDS.absent.keys():
        text[LOCAL] = _local(shape)["rope_theta"]
    models.shape(written)
    return written


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that `config_for` writes, without the text_config around them."""
    text = config.get("text_config") or config
    return {name: text[name] for name in WRITTEN if name in text}


def _local(shape: Shape) -> dict[str, Any]:
    """The rotary table of sliding layers."""
    computed = shape.ropes[SLIDING].computed
    assert computed is not None
    return {"rope_type": "default", "rope_theta": computed.theta}


def _refuse(shape: Shape, longer: Longer) -> None:
    family = models.FAMILIES[shape.model_type]
    if not getattr(family, "any_rotates", lambda shape: True)(shape):
        raise ConfigError(
            f"rope.scaling = {longer.scaling}, but nothing rotates in this {shape.model_type}",
            next=f"train within its {shape.max_positions:,} positions, without rope.scaling and rope.factor",
        )
    computed = shape.rope.computed
    if computed is None or computed.kind != "default":
        table = rope_parameters(shape.config)
        numbers = {key: value for key, value in table.get(FULL, table).items() if not isinstance(value, list)}
        shown = ", ".join(f"{key} {value}" for key, value in numbers.items())
        raise ConfigError(
            f"rope.scaling = {longer.scaling}, but this {shape.model_type} scales already: {shown}",
            next=f"train within its {shape.max_positions:,} positions, without rope.scaling and rope.factor",
        )
    known = getattr(family, "SCALED_BY", SCALINGS)
    if not known:
        raise ConfigError(
            f"rope.scaling = {longer.scaling} is not built for {shape.model_type}: it has several tables",
            next=f"train within its {shape.max_positions:,} positions, without rope.scaling and rope.factor",
        )
    if longer.scaling not in known:
        raise ConfigError(
            f"rope.scaling = {longer.scaling} is not built for {shape.model_type}; built: {', '.join(known)}",
            next=f"--rope-scaling {' or '.join(known)}",
        )
    if computed.width <= 2:
        raise ConfigError(
            f"rope.scaling = {longer.scaling}, but one pair of elements rotates in this {shape.model_type}",
            next="train without rope.scaling and rope.factor",
        )
