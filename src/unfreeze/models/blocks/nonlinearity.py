"""Activations of a dense MLP as parts, each with its own backward. I intermediate width.

Each saves its inputs for backward and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.swiglu import swiglu


@dataclass(frozen=True)
class Nonlinearity:
    """The function between an MLP's projections.

    apply   gate, up [..., I] -> h [..., I]; in an MLP without a gate: x [..., I] -> h [..., I]
    alive   tensors of width I alive at the peak of its backward, inputs included
    """

    name: str
    apply: Callable[..., Tensor]
    alive: int


class _GatedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dup = F.gelu(gate, approximate="tanh").mul_(dh)
        return torch.ops.aten.gelu_backward(dh * up, gate, approximate="tanh"), dup


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(2).mul_(dh)


def _gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    return _GatedGelu.apply(gate, up)


def _squared_relu(x: Tensor) -> Tensor:
    return _SquaredRelu.apply(x)


GATED_SILU = Nonlinearity("silu", swiglu, 5)  # gate, up, dh, dgate, dup
"""silu(gate) · up. Source: Shazeer 2020, arXiv:2002.05202."""
GATED_GELU = Nonlinearity("gelu_pytorch_tanh", _gated_gelu, 6)  # the same, and dh · up
"""gelu(gate) · up, gelu by its tanh formula (Hendrycks & Gimpel 2016, arXiv:1606.08415). Gemma."""
SQUARED_RELU = Nonlinearity("relu2", _squared_relu, 3)  # x, dh, dx
"""max(x, 0)². Source: So et al. 2021, arXiv:2109.08668. nanochat."""
GATED = {part.name: part for part in (GATED_SILU, GATED_GELU)}
"""Gated activations by their name in config.json."""
