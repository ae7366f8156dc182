"""A short convolution between two gates, in the place of attention (LFM2). T tokens, D model width."""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.recompute import work_bytes
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recurrent import ShortConv


class GatedConv(Block):
    """y = out_proj(C · conv(B · x')), [B | C | x'] = in_proj(x). Source: transformers' Lfm2ShortConv."""

    def __init__(self, layer: int, *, in_proj: Linear, conv: ShortConv, out_proj: Linear):
        super().__init__()
        self.name = f"{layer}.conv"
        self.conv, self.in_proj, self.out_proj = conv, in_proj, out_proj

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        B_TD, C_TD, inner_TD = self.in_proj(x_TD, run.reuse_linear).chunk(3, -1)
        mixed_TD = self.conv(B_TD * inner_TD, run, self.name)
        return self.out_proj(C_TD * mixed_TD, run.reuse_linear)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row's window."""
        return self.conv.state_bytes(dtype)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: in_proj's product (3 D), input and output of the convolution, and out_proj's input.

        Own: gradients of the three parts of the product. Recomputation keeps the products.
        """
        D, size = self.conv.channels, dtype.itemsize
        return Bytes(held=6 * D * size, own=3 * D * size, linear=4 * D * size, scratch=work_bytes(device))
