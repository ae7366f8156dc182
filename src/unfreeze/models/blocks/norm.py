"""RMSNorm as a module; the arithmetic is kernels/rms_norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unfreeze.kernels.choice.choose import by_record
from unfreeze.kernels.rms_norm import OP, rms_norm
from unfreeze.models.blocks.bytes import Block, Bytes


class RMSNorm(Block):
    """y = weight · x / sqrt(mean(x²) + eps). x [..., D] -> [..., D]."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: its output, for the products that follow, and a float32 per row.

        Own: gradients of output and input, of which one has the place of the output. Where a CPU runs the
        reference, two float32 copies besides.
        """
        width, size = self.weight.numel(), dtype.itemsize
        reference = device == "cpu" and by_record(OP, torch.device(device), dtype, "many").runs == "reference"
        return Bytes(held=width * size + 4, own=width * (size + 8 * reference))
