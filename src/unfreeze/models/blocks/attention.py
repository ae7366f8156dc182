"""Multi-head attention with grouped keys and values (GQA) and rotary positions.

T tokens, D model width, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.rotary import rotary
from unfreeze.models.blocks.bytes import Block, Bytes, total
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass


class Attention(Block):
    """y = o_proj(softmax(q kᵀ / sqrt(d)) v), q and k rotated in halves.

    q_norm and k_norm (Qwen3) act per head before the rotation.
    """

    def __init__(
        self,
        layer: int,
        head_dim: int,
        *,
        q_proj: Linear,
        k_proj: Linear,
        v_proj: Linear,
        o_proj: Linear,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ):
        super().__init__()
        self.layer, self.head_dim = layer, head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = q_proj, k_proj, v_proj, o_proj
        self.q_norm, self.k_norm = q_norm, k_norm

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        q_THd = self.q_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        k_TGd = self.k_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        v_TGd = self.v_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TGd = self.q_norm(q_THd), self.k_norm(k_TGd)
        q_THd = rotary(q_THd, run.cos_Tr, run.sin_Tr, "halves")
        k, v = run.remember(self.layer, rotary(k_TGd, run.cos_Tr, run.sin_Tr, "halves"), v_TGd)
        return self.o_proj(run.attend(q_THd, k, v, self.head_dim**-0.5).flatten(1), run.reuse_linear)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Its parts; kept are what attention gives (`attention_output`) and the linear layers' outputs."""
        linears = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        return total((*linears, self.q_norm, self.k_norm), dtype, device) + Bytes(
            expensive=attention_output(
                self.o_proj.in_features, self.q_proj.out_features // self.head_dim, dtype, device
            ),
            linear=dtype.itemsize * sum(linear.out_features for linear in linears),
        )


def attention_output(width: int, heads: int, dtype: torch.dtype, device: str) -> int:
    """Bytes per token of attention's output, as wide as the values, and its float32 log-sum-exp per head.

    0 on CUDA, where a second visit computes it again.
    """
    return 0 if device == "cuda" else width * dtype.itemsize + 4 * heads
