"""Offload layer inputs [T, D] to host memory in forward, and bring them back for backward.

The input of layer l is copied to the host while layer l computes, and that of layer l - 1 is copied back
during layer l's backward. So the device holds two of L: one in use, one in transit. The last layer's input
stays, because backward starts with it. Host memory has a buffer for each other layer (page-locked if a GPU
copies), reused in every pass.
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

    on_device  the tensor, while it is on the device or in transit
    moved      event at which the current copy is done
    """

    layer: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    on_device: Tensor | None = None
    moved: Any = None


class BoundaryInHost:
    """Offloads the inputs of these layers.

    `poison`, for tests: fill memory that must not be read any more with NaN.
    """

    poison = False

    def __init__(self, layers: Sequence[nn.Module], lane: Lane):
        self._layers = list(layers)  # keep references, so that ids stay unique
        self._index = {id(layer): index for index, layer in enumerate(layers)}
        self._lane = lane
        self._buffers: list[Tensor | None] = [None] * len(self._layers)
        # the input whose values each buffer holds
        self._kept: list[_Kept | None] = [None] * len(self._layers)
        self._leaving: _Kept | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer is not None)

    def keep(self, ctx: Any, layer: nn.Module, x_TD: Tensor) -> None:
        """Queue the copy to the host. The tensor stays alive until the next layer's input arrives.

        Raises DoesNotFit if CUDA does not page-lock the buffer.
        """
        self._left()
        index = self._index[id(layer)]
        former = self._kept[index]
        # prefetched by a backward pass that was interrupted
        if former is not None and former.moved is not None:
            self._lane.follow(former.moved)
        x_TD = x_TD.detach()
        saved = _Kept(index, x_TD.shape, x_TD.dtype, x_TD.device, x_TD)
        ctx.boundary = self._kept[index] = saved
        if index == len(self._layers) - 1:
            return
        host = self._buffer(saved)
        with self._lane.copying(self._lane.mark()):
            host.copy_(x_TD, non_blocking=True)
            saved.moved = self._lane.mark()
        self._leaving = saved

    def give(self, ctx: Any) -> Tensor:
        """Return the layer's input, and prefetch the previous layer's.

        Raises UserError if another forward pass in between overwrote its buffer.
        """
        saved: _Kept = ctx.boundary
        if self._kept[saved.layer] is not saved:
            raise UserError(
                f"the input of layer {saved.layer} is no longer in host memory: the model was run forward"
                " again before its backward",
                next="--place.boundary device",
            )
        self._left()
        x_TD = self._send_for(saved)
        if saved.moved is not None:
            self._lane.follow(saved.moved)
        saved.on_device = saved.moved = None
        if saved.layer == len(self._layers) - 1:
            self._kept[saved.layer] = None  # it was never copied to the host
        before = self._kept[saved.layer - 1] if saved.layer else None
        if before is not None:
            self._send_for(before)
        return x_TD

    def _left(self) -> None:
        """Release the GPU copy of the last offloaded input; kernels queued later may reuse its memory."""
        if self._leaving is None:
            return
        leaving, self._leaving = self._leaving, None
        self._lane.follow(leaving.moved)
        if self.poison and leaving.on_device is not None:
            leaving.on_device.fill_(torch.nan)
        leaving.on_device = leaving.moved = None

    def _send_for(self, saved: _Kept) -> Tensor:
        """Return the tensor on the device, or in transit to it."""
        if saved.on_device is None:
            # allocated on the compute stream, so that it is freed in order with the computation
            x_TD = torch.empty(saved.shape, dtype=saved.dtype, device=saved.device)
            if self.poison:
                x_TD.fill_(torch.nan)
            host = self._buffer(saved)
            with self._lane.copying(self._lane.mark()):
                x_TD.copy_(host, non_blocking=True)
                saved.moved = self._lane.mark()
            saved.on_device = x_TD
            if self.poison:
                self._lane.settle()
                host.fill_(torch.nan)
        return saved.on_device

    def _buffer(self, saved: _Kept) -> Tensor:
        """Return the layer's host buffer as a tensor of the input's shape, enlarged if needed."""
        nbytes = saved.shape.numel() * saved.dtype.itemsize
        buffer = self._buffers[saved.layer]
        if buffer is None or len(buffer) < nbytes:
            self._lane.settle()  # no copy may still use the buffer being replaced
            self._buffers[saved.layer] = buffer = None
            buffer = (pinned if self._lane.pins else torch.empty)(nbytes, dtype=torch.uint8)
            self._buffers[saved.layer] = buffer
        return buffer[:nbytes].view(saved.dtype).view(saved.shape)
