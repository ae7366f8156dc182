"""The residual block every family shares. T tokens, D model width."""

from __future__ import annotations

from torch import Tensor, nn

from unfreeze.models.blocks.mlp import with_residual
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-norm residual block."""

    def __init__(self, *, self_attn: nn.Module, mlp: nn.Module, input_layernorm: RMSNorm, post_attention_layernorm: RMSNorm):
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm, self.post_attention_layernorm = input_layernorm, post_attention_layernorm

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), run)
        return with_residual(self.mlp, self.post_attention_layernorm, x_TD, run)
