"""The residual block every family shares. T tokens, D model width."""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.mlp import with_residual
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass


class Layer(Block):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-norm residual block."""

    def __init__(
        self, *, self_attn: Block, mlp: Block, input_layernorm: RMSNorm, post_attention_layernorm: RMSNorm
    ):
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm, self.post_attention_layernorm = input_layernorm, post_attention_layernorm

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), run)
        return with_residual(self.mlp, self.post_attention_layernorm, x_TD, run)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Its parts in order, and during all of its backward 2 D.

        They are its output, and the sum behind attention, whose place its gradient takes.
        """
        sums = Bytes(held=2 * dtype.itemsize * self.input_layernorm.weight.numel())
        parts = (self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp)
        return sum((part.bytes(dtype, device) for part in parts), sums)
