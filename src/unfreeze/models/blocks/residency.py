"""Residency: where a layer's weights are while it is computed.

A pass carries one and tells it which layer comes next. By default every weight is here all the time. A
residency that streams (parallel/placement/residency.py) fills a buffer before the layer is computed, and
again before its backward.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Residency(Protocol):
    """Told each layer before it is computed, in forward and in backward.

    After `visit(layer)` that layer's weights are here, until another layer is visited. The tensors of its
    parameters and buffers are the same objects at every visit; their memory may be another layer's between.
    """

    def visit(self, layer: nn.Module, /) -> None: ...


class Resident:
    """Every weight is here all the time."""

    def visit(self, layer: nn.Module) -> None:
        pass


RESIDENT = Resident()


class _Returning(torch.autograd.Function):
    """y = x; its backward runs before that of all that x was made of, and visits the layer first."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, layer: nn.Module, residency: Residency) -> Tensor:
        ctx.layer, ctx.residency = layer, residency
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, dx_TD: Tensor) -> tuple[Tensor, None, None]:
        ctx.residency.visit(ctx.layer)
        return dx_TD, None, None


def visited_again(y_TD: Tensor, layer: nn.Module, residency: Residency) -> Tensor:
    """y, a layer's output, such that autograd visits the layer before it goes back through it.

    For a layer whose graph autograd keeps: its nodes refer to weights that are another layer's by then.
    Autograd runs the nodes that were made last first, so the layer behind is done when this one is visited.
    """
    return y_TD if isinstance(residency, Resident) else _Returning.apply(y_TD, layer, residency)
