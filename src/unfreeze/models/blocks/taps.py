"""Taps: the layer tensors that a pass collects for an objective (core/taps.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from unfreeze.core.taps import TAP_NAMES, Tap, TapName


class LayerTaps:
    """The named tensors of one layer, in the order of TAP_NAMES."""

    def __init__(self, names: Iterable[TapName]):
        requested = frozenset(names)
        self.names: tuple[TapName, ...] = tuple(name for name in TAP_NAMES if name in requested)
        self.found: dict[TapName, Tensor] = {}

    def put(self, name: TapName, tensor: Tensor) -> None:
        """Keep the tensor if it is requested.

        It keeps a view. The gradients of several readers are summed there before they meet the layer's own.
        So the sum is bit-identical whether or not the layer is recomputed.
        """
        if name in self.names:
            self.found[name] = tensor.view_as(tensor)

    def append(self, name: TapName, tensor: Tensor) -> None:
        """As put, for a tensor that a layer has several of: they lie side by side, in the order they came."""
        before = self.found.get(name)
        self.put(name, tensor if before is None else torch.cat((before, tensor), dim=1))

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of `names`."""
        return tuple(self.found[name] for name in self.names)

    def replace(self, tensors: Iterable[Tensor]) -> None:
        """Replace the tensors, in the order of `names`."""
        self.found = dict(zip(self.names, tensors, strict=True))

    def put_rows(self, rows: slice, part: LayerTaps, num_tokens: int) -> None:
        """Copy the tensors of a chunk of the tokens into [T, …]."""
        for name, tensor in part.found.items():
            if name not in self.found:
                self.found[name] = tensor.new_empty((num_tokens, *tensor.shape[1:]))
            self.found[name][rows] = tensor


class _Carries(Protocol):
    taps: LayerTaps | None


class Taps:
    """The taps requested from one pass over a batch, and the tensors found.

    The index after the last layer has its input only.
    """

    def __init__(self, taps: Iterable[Tap]):
        self.asked = frozenset(taps)
        self.found: dict[Tap, Tensor] = {}

    def enter(self, layer: int, x_TD: Tensor, run: _Carries) -> Tensor:
        """Before each layer and after the last: collect the previous layer's taps, set those of this one.

        If its input is requested, the layer gets a view of it. The layer's own gradient there is then one
        sum, as it is when the layer is recomputed.
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
