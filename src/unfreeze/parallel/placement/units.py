"""Units of offloaded weights (a layer's experts or a group of them), and their layout in a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from unfreeze.checkpoint.resolve import Params, Placement
from unfreeze.core.errors import ConfigError
from unfreeze.core.rows import Rows, share
from unfreeze.core.units import format_bytes
from unfreeze.parallel.placement.owned import placement_of_experts

ALIGN = 64  # bytes; tensors in a buffer are aligned to this

Layout = Mapping[str, tuple[int, int, torch.dtype, tuple[int, ...]]]
"""Tensor name -> (first byte, bytes, dtype, shape) within a buffer."""


def layout_of(
    names: Sequence[str], params: Params
) -> dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]]:
    """Lay out the tensors one after another, each aligned to ALIGN."""
    layout: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
    start = 0
    for name in names:
        dtype, shape = params[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        layout[name] = start, size, dtype, tuple(shape)
        start += -(-size // ALIGN) * ALIGN
    return layout


def group_bytes(of_expert: Sequence[int], experts: int, buffer: int | None) -> list[int]:
    """Return the bytes of each load of a layer's experts: all of them, or as few even groups as fit `buffer`.

    of_expert: bytes of one expert in each of the layer's tensors.
    Raises ConfigError if one expert does not fit.
    """

    def of(rows: int) -> int:
        return sum(-(-rows * size // ALIGN) * ALIGN for size in of_expert)

    if buffer is None or of(experts) <= buffer:
        return [of(experts)]
    if of(1) > buffer:
        raise ConfigError(
            f"one expert of a layer takes {format_bytes(of(1))}, and a buffer may have"
            f" {format_bytes(buffer)}",
            next="a larger --place.buffer, or a machine with more memory",
        )
    count = next(count for count in range(2, experts + 1) if of(-(-experts // count)) <= buffer)
    return [of(len(share(experts, index, count))) for index in range(count)]


def layout_bytes(layout: Layout) -> int:
    """Bytes of a buffer with this layout."""
    return max((-(-(start + size) // ALIGN) * ALIGN for start, size, _, _ in layout.values()), default=0)


@dataclass(frozen=True)
class Unit:
    """The weights loaded at once: the experts of a layer, or a group of them.

    key      what is visited for it: the layer, or a group's own marker
    layout   tensor name -> its place in a buffer; a group's names are `name[first:last]`
    rows     the group's experts; None: all of the layer's
    """

    key: object
    names: tuple[str, ...]
    layout: Layout
    rows: Rows | None = None

    def placements(self, by_name: Mapping[str, Sequence[Placement]], params: Params) -> list[Placement]:
        """Return the placements that fill this unit. by_name: the layer's placements, without extras."""
        if self.rows is None:
            return [placement for name in self.names for placement in by_name.get(name, ())]
        return [
            replace(part, param=own)
            for name, own in zip(self.names, self.layout, strict=True)
            for placement in by_name.get(name, ())
            if (part := placement_of_experts(placement, params[name][1], self.rows)) is not None
        ]


def units_of(key: object, names: Sequence[str], params: Params, buffer: int | None) -> list[Unit]:
    """Return a layer as one unit, or as few even groups of neighbouring experts that fit `buffer` bytes.

    Raises ConfigError if one expert does not fit.
    """
    experts = params[names[0]][1][0]
    of_expert = [layout[1] // experts for layout in layout_of(names, params).values()]
    count = len(group_bytes(of_expert, experts, buffer))
    if count == 1:
        return [Unit(key, tuple(names), layout_of(names, params))]
    units: list[Unit] = []
    for index in range(count):
        rows = share(experts, index, count)
        own = {
            f"{name}[{rows.first}:{rows.last}]": (params[name][0], (len(rows), *params[name][1][1:]))
            for name in names
        }
        units.append(Unit(object(), tuple(names), layout_of(list(own), own), rows))
    return units
