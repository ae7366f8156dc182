"""OLMo 3: OLMo 2's block; three of four layers slide over a window, and their rotation is never scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama, olmo2
from unfreeze.models.allowed import names
from unfreeze.models.layer_types import FULL, SLIDING, layer_types, mask, per_kind
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import PostNormLayer

RULES = llama.RULES
ignored = llama.ignored
THETA = 500000.0
FIELDS = replace(
    olmo2.FIELDS,
    absent={**olmo2.FIELDS.absent, "sliding_window": 4096},
    read=olmo2.FIELDS.read | names("layer_types"),
    per_kind=(FULL, SLIDING),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    kinds = layer_types(config, lambda index: FULL if (index + 1) % 4 == 0 else SLIDING)
    # a rope_theta outside the tables applies to the full layers, as in transformers
    full, sliding = per_kind(config, full=config.get("rope_theta", THETA), sliding=THETA)
    sizes = llama.shape(full)
    ropes = {SLIDING: llama.shape(sliding).rope}
    return replace(sizes, family="olmo3", layer_types=kinds, ropes=ropes, config=dict(config))


def layer(shape: Shape, index: int, make: Factory) -> PostNormLayer:
    """Decoder layer `index`."""
    rope = SLIDING if shape.layer_types[index] == SLIDING else ""
    return olmo2.layer(shape, index, make, mask=mask(shape, index), rope=rope)
