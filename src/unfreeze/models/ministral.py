"""Ministral 8B: Mistral's block; layer_types names the layers that slide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze.models import llama, mistral
from unfreeze.models.allowed import names
from unfreeze.models.layer_types import everywhere
from unfreeze.models.shape import Shape, require

RULES = llama.RULES
ignored = llama.ignored
layer = mistral.layer
FIELDS = replace(mistral.FIELDS, read=names("head_dim layer_types"), only={})


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json, which must have head_dim: transformers' class has no default for it."""
    require(config, "head_dim")
    return replace(llama.shape(config), family="ministral", layer_types=everywhere(config))
