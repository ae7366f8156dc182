"""The activation of an expert, h = a(gate, up), and the layout of gate and up in gate_up; or h = a(up) alone.

    SwiGLU         silu(gate) · up                            Shazeer 2020, arXiv:2002.05202
    GeGLU          gelu(gate) · up, gelu by its tanh form     the same
    ClampedSwiGLU  (u + added) · g · sigmoid(alpha g), g and u clamped gate and up     gpt-oss
    SquaredReLU    max(up, 0)², no gate                       So et al. 2021, arXiv:2109.08668

n rows, I intermediate width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Activation(ABC):
    """The activation of an expert. Instances that compare equal are the same activation.

    kind          its name in buckets, records and kernels
    projections   the matrices before it, in the order of gate_up's rows; up alone, if there is no gate
    interleaved   gate and up alternate along gate_up's 2I, gate first; else gate is the first half
    """

    kind: ClassVar[str]
    projections: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    interleaved: bool = False

    def split(self, gate_up: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
        """gate and up, each I wide, as views along `dim`, which is 2I wide."""
        if self.interleaved:
            gate, up = gate_up.unflatten(dim, (-1, 2)).unbind(dim if dim < 0 else dim + 1)
            return gate, up
        gate, up = gate_up.chunk(2, dim=dim)
        return gate, up

    def split_first(self, rows_nM: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """gate and up among the first 2 `width` columns of a wider buffer; in one operation, if halves."""
        if self.interleaved:
            return self.split(rows_nM[:, : 2 * width])
        gate, up, _ = rows_nM.split([width, width, rows_nM.shape[1] - 2 * width], dim=1)
        return gate, up

    @abstractmethod
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """h [n, I] in the dtype of gate and up."""

    @abstractmethod
    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(h, gradient of gate, gradient of up) from that of h; all [n, I], in float32."""


@dataclass(frozen=True)
class SwiGLU(Activation):
    """silu(gate) · up."""

    kind = "silu"

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = gate.sigmoid()
        silu = gate * s
        return silu * up, grad * up * (s + silu * (1 - s)), grad * silu


@dataclass(frozen=True)
class GeGLU(Activation):
    """gelu(gate) · up, gelu(g) = g/2 · (1 + tanh(√(2/π) (g + 0.044715 g³)))."""

    kind = "gelu"

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gelu = F.gelu(gate, approximate="tanh")
        dgate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return gelu * up, dgate, grad * gelu


@dataclass(frozen=True)
class ClampedSwiGLU(Activation):
    """(u + added) · g · sigmoid(alpha g), g = min(gate, limit), u = up within ±limit.

    A clamped number has no gradient. Source: gpt-oss's reference, arXiv:2508.10925; DeepSeek-V4 adds nothing.
    """

    kind = "clamped"
    alpha: float = 1.702
    limit: float = 7.0
    added: float = 1.0

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        g, u = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (u + self.added) * (g * (g * self.alpha).sigmoid())

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        g, u = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        s = (g * self.alpha).sigmoid()
        gated = g * s
        dgate = grad * (u + self.added) * (s + self.alpha * gated * (1 - s)) * (gate <= self.limit)
        return (u + self.added) * gated, dgate, grad * gated * (up.abs() <= self.limit)


@dataclass(frozen=True)
class SquaredReLU(Activation):
    """max(x, 0)² of one matrix: `gate` is all of gate_up, `up` has no column."""

    kind = "relu2"
    projections = ("up_proj",)

    def split(self, gate_up: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
        return gate_up, gate_up.narrow(dim, 0, 0)

    def split_first(self, rows_nM: Tensor, width: int) -> tuple[Tensor, Tensor]:
        return rows_nM[:, :width], rows_nM[:, :0]

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.relu(gate).square()

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positive = F.relu(gate)
        return positive.square(), 2 * grad * positive, up


SWIGLU = SwiGLU()
