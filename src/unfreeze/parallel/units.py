"""What comes into a buffer at once, a layer's experts or a group of them, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from unfreeze.checkpoint.resolve import Params, Placement
from unfreeze.core.errors import ConfigError
from unfreeze.core.rows import Rows, share
from unfreeze.core.units import format_bytes
from unfreeze.parallel.owned import narrow

ALIGN = 64  # bytes; a tensor of a buffer begins at a multiple

Layout = Mapping[str, tuple[int, int, torch.dtype, tuple[int, ...]]]
"""name of a tensor -> (first byte, bytes, dtype, shape) within a buffer."""


def layout_of(
    names: Sequence[str], params: Params
) -> dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]]:
    """The tensors one after another, each at a multiple of ALIGN."""
    made: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
    start = 0
    for name in names:
        dtype, shape = params[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        made[name] = start, size, dtype, tuple(shape)
        start += -(-size // ALIGN) * ALIGN
    return made


def layout_bytes(layout: Layout) -> int:
    """Bytes of a buffer that holds it."""
    return max((-(-(start + size) // ALIGN) * ALIGN for start, size, _, _ in layout.values()), default=0)


@dataclass(frozen=True)
class Unit:
    """What comes at once: the experts of a layer, or a group of them.

    key      who is visited for it: the layer, or a group's own mark
    layout   name of a tensor -> its place in a buffer; a group's names are `name[first:last]`
    rows     the group's experts; None: all of the layer's
    """

    key: object
    names: tuple[str, ...]
    layout: Layout
    rows: Rows | None = None

    def placements(self, found: Mapping[str, Sequence[Placement]], params: Params) -> list[Placement]:
        """Those of a layer that fill it. found: by name, without extras."""
        if self.rows is None:
            return [placement for name in self.names for placement in found.get(name, ())]
        return [
            replace(part, param=own)
            for name, own in zip(self.names, self.layout, strict=True)
            for placement in found.get(name, ())
            if (part := narrow(placement, params[name][1], self.rows)) is not None
        ]


def units_of(key: object, names: Sequence[str], params: Params, buffer: int | None) -> list[Unit]:
    """A layer as one unit, or in as few even groups of neighbouring experts as fit a buffer of so many bytes.

    Raises ConfigError where one expert does not fit.
    """
    whole = layout_of(names, params)
    if buffer is None or layout_bytes(whole) <= buffer:
        return [Unit(key, tuple(names), whole)]
    experts = params[names[0]][1][0]
    for count in range(2, experts + 1):
        units: list[Unit] = []
        for index in range(count):
            rows = share(experts, index, count)
            own = {
                f"{name}[{rows.first}:{rows.last}]": (params[name][0], (len(rows), *params[name][1][1:]))
                for name in names
            }
            units.append(Unit(object(), tuple(names), layout_of(list(own), own), rows))
        if max(layout_bytes(unit.layout) for unit in units) <= buffer:
            return units
    one = layout_bytes(units[0].layout)
    raise ConfigError(
        f"one expert of a layer takes {format_bytes(one)}, and a buffer may have {format_bytes(buffer)}",
        next="a machine with more memory",
    )
