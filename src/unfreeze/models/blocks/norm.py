"""RMSNorm as a module; the arithmetic is kernels/rms_norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.kernels.choice.choose import by_record
from unfreeze.kernels.rms_norm import OP, rms_norm
from unfreeze.models.blocks.bytes import Block, Bytes

if TYPE_CHECKING:
    from unfreeze.kernels.decode_step.program import Row
    from unfreeze.models.blocks.recording import Recording


class RMSNorm(Block):
    """y = gain · x / sqrt(mean(x²) + eps), the gain being `weight`. x [..., D] -> [..., D]."""

    weight: Tensor

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.size, self.eps = size, eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.gain(), self.eps)

    def record(self, to: Recording, x: Row, groups: int = 1) -> Row:
        """The norm of each of `groups` equal parts of x."""
        return to.program.norm(x, self.gain(), self.eps, groups)

    def gain(self) -> Tensor:
        """The factor of the normalised values, [D]."""
        return self.weight

    def reset(self) -> None:
        """Set the gain to 1."""
        nn.init.ones_(self.weight)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: its output, for the products that follow, and a float32 per row.

        Own: gradients of output and input, one of which takes the place of the output. The CPU reference adds
        two float32 copies.
        """
        size = dtype.itemsize
        reference = device == "cpu" and by_record(OP, torch.device(device), dtype, "many").runs == "reference"
        return Bytes(held=self.size * size + 4, own=self.size * (size + 8 * reference))


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose gain is 1 + weight (Gemma).

    The sum is in float32: in bf16 a weight of 0.01 would lose most of its digits to the 1.
    """

    def gain(self) -> Tensor:
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))

    def reset(self) -> None:
        nn.init.zeros_(self.weight)


class PlainRMSNorm(RMSNorm):
    """x / sqrt(mean(x²) + eps), without a weight (nanochat)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str):
        Block.__init__(self)
        self.size, self.eps = size, eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, torch.ones(self.size, dtype=x_TD.dtype, device=x_TD.device), self.eps)

    def gain(self) -> Tensor:
        return torch.ones(self.size)

    def reset(self) -> None:
        """Do nothing: it has no weight."""


class LayerNorm(Block):
    """y = weight · (x - mean(x)) / sqrt(var(x) + eps) + bias. x [..., D] -> [..., D]."""

    weight: Tensor
    bias: Tensor

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.size, self.eps = size, eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.layer_norm(x_TD, (self.size,), self.weight, self.bias, self.eps)

    def reset(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
