"""Boundary activations: the input [T, D] of a layer, all that a recomputed layer keeps until its backward.

A pass carries a `Boundary`, which stores them. By default they stay on the device;
parallel/placement/boundary.py offloads them to host memory.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn


class Boundary(Protocol):
    """Keeps a layer's input from forward to backward. ctx is the layer's autograd context."""

    def keep(self, ctx: Any, layer: nn.Module, x_TD: Tensor, /) -> None:
        """Store x in forward, before the layer is computed."""
        ...

    def give(self, ctx: Any, /) -> Tensor:
        """Return x [T, D] on the device, without a graph, in backward before the layer is recomputed."""
        ...


class BoundaryOnDevice:
    """Autograd saves the tensor where it is."""

    def keep(self, ctx: Any, layer: nn.Module, x_TD: Tensor) -> None:
        ctx.save_for_backward(x_TD)

    def give(self, ctx: Any) -> Tensor:
        return ctx.saved_tensors[0].detach()


ON_DEVICE = BoundaryOnDevice()
