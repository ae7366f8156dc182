"""RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = weight · x / sqrt(mean(x²) + eps), the mean in fp32 whatever x is: in bf16 or fp16 an all-zero row with a tiny eps becomes NaN.

    Source: Zhang & Sennrich 2019; rounding order (normalise in fp32, round, then scale) as in the Llama reference.
    """

    def __init__(self, size: int, eps: float, *, dtype: Any, device: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        x32 = x_TD.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x_TD.dtype)
