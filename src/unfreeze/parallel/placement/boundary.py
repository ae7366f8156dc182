"""Boundary activations in host memory: a layer's input [T, D] goes there in forward and is back for backward.

Its copy goes down beside layer l's computation, and l - 1's comes up beside layer l's backward. So the device
holds two of L: the one at work, and the one on its way. The last layer's stays: backward begins with it.
Host memory is a buffer for each other layer, page-locked where a GPU copies, and used again in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.core.errors import UserError
from unfreeze.parallel.processes.lanes import Lane, pinned


@dataclass
class _Kept:
    """A layer's input.

    on_device  the tensor, while it is there or on its way from or to there
    moved      when the copy that is under way is done
    """

    layer: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    on_device: Tensor | None = None
    moved: Any = None


class BoundaryInHost:
    """A boundary for these layers. `poison`, for tests: fill with NaN what nobody may read any more."""

    poison = False

    def __init__(self, layers: Sequence[nn.Module], lane: Lane):
        self._layers = list(layers)  # their ids stay theirs
        self._index = {id(layer): index for index, layer in enumerate(layers)}
        self._lane = lane
        self._buffers: list[Tensor | None] = [None] * len(self._layers)
        self._kept: list[_Kept | None] = [None] * len(self._layers)  # whose numbers a buffer holds
        self._leaving: _Kept | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def keep(self, ctx: Any, layer: nn.Module, x_TD: Tensor) -> None:
        """Queue the copy down. The tensor stays until the next layer's comes.

        Raises DoesNotFit where CUDA does not page-lock the buffer.
        """
        self._left()
        index = self._index[id(layer)]
        former = self._kept[index]
        if former is not None and former.moved is not None:  # a backward that broke off had sent for it
            self._lane.follow(former.moved)
        x_TD = x_TD.detach()
        kept = _Kept(index, x_TD.shape, x_TD.dtype, x_TD.device, x_TD)
        ctx.boundary = self._kept[index] = kept
        if index == len(self._layers) - 1:
            return
        host = self._buffer(kept)
        with self._lane.copying(self._lane.mark()):
            host.copy_(x_TD, non_blocking=True)
            kept.moved = self._lane.mark()
        self._leaving = kept

    def give(self, ctx: Any) -> Tensor:
        """The layer's input; the one before is sent for.

        Raises UserError where another forward pass came between and used its buffer.
        """
        kept: _Kept = ctx.boundary
        if self._kept[kept.layer] is not kept:
            raise UserError(
                f"the input of layer {kept.layer} is not in host memory any more: the model was run forward"
                " again before its backward",
                next="--place.boundary device",
            )
        self._left()
        x_TD = self._send_for(kept)
        if kept.moved is not None:
            self._lane.follow(kept.moved)
        kept.on_device = kept.moved = None
        if kept.layer == len(self._layers) - 1:
            self._kept[kept.layer] = None  # it was nowhere else
        before = self._kept[kept.layer - 1] if kept.layer else None
        if before is not None:
            self._send_for(before)
        return x_TD

    def _left(self) -> None:
        """The tensor that went down last is free, for what is queued from now on."""
        if self._leaving is None:
            return
        leaving, self._leaving = self._leaving, None
        self._lane.follow(leaving.moved)
        if self.poison and leaving.on_device is not None:
            leaving.on_device.fill_(torch.nan)
        leaving.on_device = leaving.moved = None

    def _send_for(self, kept: _Kept) -> Tensor:
        """The tensor on the device, or on its way there."""
        if kept.on_device is None:
            # in the computation's memory, so that it is free when its computation is done
            x_TD = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
            if self.poison:
                x_TD.fill_(torch.nan)
            host = self._buffer(kept)
            with self._lane.copying(self._lane.mark()):
                x_TD.copy_(host, non_blocking=True)
                kept.moved = self._lane.mark()
            kept.on_device = x_TD
            if self.poison:
                self._lane.settle()
                host.fill_(torch.nan)
        return kept.on_device

    def _buffer(self, kept: _Kept) -> Tensor:
        """The layer's host memory, as the tensor that it holds; larger than before where that is needed."""
        nbytes = kept.shape.numel() * kept.dtype.itemsize
        buffer = self._buffers[kept.layer]
        if buffer is None or len(buffer) < nbytes:
            self._lane.settle()  # nothing is on its way to or from what is given back
            self._buffers[kept.layer] = buffer = None
            buffer = (pinned if self._lane.pins else torch.empty)(nbytes, dtype=torch.uint8)
            self._buffers[kept.layer] = buffer
        return buffer[:nbytes].view(kept.dtype).view(kept.shape)
