"""Residency: where a layer's weights are while it is computed.

A pass carries one and notifies it of the next layer. By default every weight is on the device all the time. A
streaming residency (parallel/placement/residency.py) fills a buffer before the layer is computed, and again
before its backward.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Residency(Protocol):
    """Notified before each layer is computed, in forward and in backward.

    After `visit(layer)` that layer's weights are on the device until another layer is visited. The tensors of
    its parameters and buffers are the same objects at every visit; between visits their memory may hold
    another layer.
    """

    def visit(self, layer: nn.Module, /) -> None: ...


class Resident:
    """Every weight is on the device all the time."""

    def visit(self, layer: nn.Module) -> None:
        pass


RESIDENT = Resident()


class _Returning(torch.autograd.Function):
    """y = x; its backward runs before that of everything x was computed from, and visits the layer first."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, layer: nn.Module, residency: Residency) -> Tensor:
        ctx.layer, ctx.residency = layer, residency
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None, None]:
        ctx.residency.visit(ctx.layer)
        return dx_TD, None, None


def visited_again(y_TD: Tensor, layer: nn.Module, residency: Residency) -> Tensor:
    """Return y, a layer's output, such that autograd visits the layer before its backward.

    For a layer whose graph autograd keeps: by then the memory of its weights holds another layer. Autograd
    runs the newest nodes first, so the following layer is done when this one is visited.
    """
    return y_TD if isinstance(residency, Resident) else _Returning.apply(y_TD, layer, residency)
