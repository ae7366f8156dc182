"""What a pass collects of its layers for an objective (core/taps.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from unfreeze.core.taps import TAP_NAMES, Tap, TapName


class LayerTaps:
    """The tensors of those names of one layer, in the order of TAP_NAMES."""

    def __init__(self, names: Iterable[TapName]):
        asked = frozenset(names)
        self.names: tuple[TapName, ...] = tuple(name for name in TAP_NAMES if name in asked)
        self.found: dict[TapName, Tensor] = {}

    def put(self, name: TapName, tensor: Tensor) -> None:
        """Keep it where it is asked for.

        A view: what several readers give back is added up there, before it meets the layer's own gradient. So
        the sum is the same to the bit whether or not the layer is computed again.
        """
        if name in self.names:
            self.found[name] = tensor.view_as(tensor)

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of `names`."""
        return tuple(self.found[name] for name in self.names)

    def replace(self, tensors: Iterable[Tensor]) -> None:
        """Others in their place, in the order of `names`."""
        self.found = dict(zip(self.names, tensors, strict=True))

    def put_rows(self, rows: slice, part: LayerTaps, num_tokens: int) -> None:
        """Copy what a chunk of the tokens found into [T, …]."""
        for name, tensor in part.found.items():
            if name not in self.found:
                self.found[name] = tensor.new_empty((num_tokens, *tensor.shape[1:]))
            self.found[name][rows] = tensor


class _Carries(Protocol):
    taps: LayerTaps | None


class Taps:
    """What one pass over a batch is asked for, and found. A layer behind the last has its input only."""

    def __init__(self, asked: Iterable[Tap]):
        self.asked = frozenset(asked)
        self.found: dict[Tap, Tensor] = {}

    def enter(self, layer: int, x_TD: Tensor, run: _Carries) -> Tensor:
        """Before a layer, and behind the last: take what the one before left, and tell the pass what to keep.

        The layer gets a view of an input that is asked for: its own gradient there is one sum, as it is where
        the layer is computed again.
        """
        if run.taps is not None:
            of_layer = zip(run.taps.names, run.taps.tensors(), strict=True)
            self.found |= {Tap(layer - 1, name): tensor for name, tensor in of_layer}
        names: set[TapName] = {tap.name for tap in self.asked if tap.layer == layer}
        inside = names - {"input"}
        run.taps = LayerTaps(inside) if inside else None
        if "input" in names:
            self.found[Tap(layer, "input")] = x_TD
            x_TD = x_TD.view_as(x_TD)
        return x_TD
