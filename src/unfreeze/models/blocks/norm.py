"""RMSNorm as a module; the arithmetic is kernels/rms_norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """y = weight · x / sqrt(mean(x²) + eps). x [..., D] -> [..., D]."""

    def __init__(self, size: int, eps: float, *, dtype: Any, device: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)
