"""Memory of experts that are loaded in groups: bytes per load, and bytes held per layer.

placement/groups.py implements it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unfreeze.core.errors import ConfigError
from unfreeze.core.units import format_bytes
from unfreeze.models.blocks.experts import UNEVEN
from unfreeze.parallel.placement.units import group_bytes
from unfreeze.parallel.plan.sizes import Sizes


def units(sizes: Sizes, buffer: int | None) -> list[int]:
    """Return the bytes of each load of offloaded experts: of a layer's, or of groups of them.

    Raises ConfigError if a layer does not fit into `buffer` and cannot be loaded in groups, or if one expert
    does not fit.
    """
    if buffer is None or max(sizes.streamed, default=0) <= buffer:
        return list(sizes.streamed)
    if sizes.come_whole:
        raise ConfigError(
            f"a buffer may have {format_bytes(buffer)}, and a layer's experts are"
            f" {format_bytes(max(sizes.streamed))}: they cannot be loaded in groups, because a norm reads"
            " their output",
            next="--place.buffer auto",
        )
    return [size for layer in sizes.of_expert for size in group_bytes(layer, sizes.num_experts, buffer)]


def sizes_with_groups(sizes: Sizes, come: Sequence[int]) -> Sizes:
    """Return the sizes with the buffers of placement/groups.py for a layer's n = T K rows.

    For all rows: x as received, instead of gate and up; in backward also their dy and dx. For the fullest
    group, UNEVEN times its share: what the op holds, which is gate and up, its result, and dx in float32 and
    rounded.
    """
    size, K, D = sizes.compute_bytes, sizes.experts_per_token, sizes.hidden_size
    gate_up, groups = K * 2 * sizes.expert_width * size, len(come) / len(sizes.streamed)
    at_work = min(1.0, UNEVEN / groups) * (gate_up + K * D * (2 * size + 4))
    held, own = K * D * size - gate_up, int(2 * K * D * size + at_work)
    dense = len(sizes.held) - len(sizes.streamed)
    return replace(
        sizes,
        layer=sizes.layer + held + own,
        held=tuple(of + held * (layer >= dense) for layer, of in enumerate(sizes.held)),
        own=sizes.own + own,
    )
