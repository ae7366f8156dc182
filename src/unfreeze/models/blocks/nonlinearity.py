"""Activations of a dense MLP as parts, each with its own backward. I intermediate width.

Each saves its inputs for backward and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.swiglu import swiglu
from unfreeze.kernels.swiglu.activation import ClampedSwiGLU, GeGLU


@dataclass(frozen=True)
class Nonlinearity:
    """The function between an MLP's projections.

    apply   gate, up [..., I] -> h [..., I]; in an MLP without a gate: x [..., I] -> h [..., I]
    alive   tensors of width I alive at the peak of its backward, inputs included
    more_on_cpu  how many more there are on a CPU, where it has no loop
    """

    name: str
    apply: Callable[..., Tensor]
    alive: int
    more_on_cpu: int = 0

    def alive_on(self, device: str) -> int:
        """`alive` on that kind of device."""
        return self.alive + (self.more_on_cpu if device == "cpu" else 0)


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(2).mul_(dh)


def _squared_relu(x: Tensor) -> Tensor:
    return _SquaredRelu.apply(x)


GATED_SILU = Nonlinearity("silu", swiglu, 5)  # gate, up, dh, dgate, dup
"""silu(gate) · up. Source: Shazeer 2020, arXiv:2002.05202."""
GATED_GELU = Nonlinearity(
    "gelu_pytorch_tanh", functools.partial(swiglu, activation=GeGLU()), 5, more_on_cpu=1
)
"""gelu(gate) · up, gelu by its tanh formula (Hendrycks & Gimpel 2016, arXiv:1606.08415). Gemma."""


def clamped_silu(limit: float) -> Nonlinearity:
    """silu(min(gate, limit)) · up within ±limit (DeepSeek-V4)."""

    def apply(gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up, ClampedSwiGLU(alpha=1.0, limit=limit, added=0.0))

    return Nonlinearity(f"silu within {limit:g}", apply, 5, more_on_cpu=6)


SQUARED_RELU = Nonlinearity("relu2", _squared_relu, 3)  # x, dh, dx
"""max(x, 0)². Source: So et al. 2021, arXiv:2109.08668. nanochat."""
GATED = {part.name: part for part in (GATED_SILU, GATED_GELU)}
"""Gated activations by their name in config.json."""
