"""Multi-head attention with grouped keys and values (GQA) and rotary positions.

T tokens, D model width, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.rotary import rotary
from unfreeze.models.blocks.bytes import Block, Bytes
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
        """Held and own: as attention itself (`attention_bytes`); held besides what q_norm and k_norm take.

        Kept are attention's output and the linear layers' outputs.
        """
        q, k, D = self.q_proj.out_features, self.k_proj.out_features, self.o_proj.out_features
        heads = q // self.head_dim
        attend = attention_bytes(heads, k // self.head_dim, self.head_dim, self.head_dim, dtype, device)
        normed = q + k if self.q_norm is not None else 0
        return Bytes(held=normed * dtype.itemsize, linear=(q + 2 * k + D) * dtype.itemsize) + attend


def attention_bytes(
    heads: int, key_heads: int, width: int, value_width: int, dtype: torch.dtype, device: str
) -> Bytes:
    """Of attention between its projections, H query and G key heads, d and v wide.

    Held: q, k, v, the output and its float32 log-sum-exp per head. Own: gradients of the output and of q, k,
    v. A flash kernel on CUDA also sums dq in float32, and has dk and dv per query head until it adds up those
    of a group. Source: FlashAttention-2, arXiv:2307.08691, 3.1.
    Kept are output and log-sum-exp; nothing on CUDA, where a second visit computes them again.
    """
    size = dtype.itemsize
    q, k, v, o = heads * width, key_heads * width, key_heads * value_width, heads * value_width
    output = o * size + 4 * heads
    own = (o + q + k + v) * size
    if device == "cuda":
        own += 4 * q + (q + o) * size * (heads != key_heads)
    kept = 0 if device == "cuda" else output
    shape = heads, key_heads, width, value_width
    return Bytes((q + k + v) * size + output, own, expensive=kept, attention=shape)
