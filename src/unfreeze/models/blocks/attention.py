"""Multi-head attention with grouped keys and values (GQA) and rotary positions.

T tokens, D model width, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unfreeze.kernels.attention import CAUSAL, Mask
from unfreeze.kernels.rotary import Pairing, rotary
from unfreeze.models.blocks.bytes import AttentionShape, Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass


class Attention(Block):
    """y = o_proj(softmax(scale · q kᵀ) v), q and k rotated in `pairs`.

    scale    1/sqrt(d) where it is None
    rope     name of the rotary tables (`Shape.ropes`), "" for the model's own; None: a layer without rotation
    mask     a sliding window or chunks; softcap: cap · tanh(score / cap)
    sinks    [H], a learnt score of each head that takes its share of the softmax (gpt-oss)
    q_norm, k_norm   per head, before the rotation (Qwen3)
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
        scale: float | None = None,
        rope: str | None = "",
        mask: Mask = CAUSAL,
        softcap: float | None = None,
        sinks: nn.Parameter | None = None,
        pairs: Pairing = "halves",
    ):
        super().__init__()
        self.pairs: Pairing = pairs
        self.layer, self.head_dim = layer, head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = q_proj, k_proj, v_proj, o_proj
        self.q_norm, self.k_norm = q_norm, k_norm
        self.scale = head_dim**-0.5 if scale is None else scale
        self.rope, self.mask, self.softcap = rope, mask, softcap
        self.sinks = sinks

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        q_THd = self.q_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        k_TGd = self.k_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        v_TGv = self.v_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TGd = self.q_norm(q_THd), self.k_norm(k_TGd)
        return self.attend(q_THd, k_TGd, v_TGv, x_TD, run)

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, x_TD: Tensor, run: Pass) -> Tensor:
        """What follows the projections: rotation, the cache, attention, o_proj. -> [T, D]."""
        if self.rope is not None:
            tables = run.tables(self.rope)
            q_THd, k_TGd = rotary(q_THd, *tables, self.pairs), rotary(k_TGd, *tables, self.pairs)
        k, v = run.remember(self.layer, k_TGd, v_TGv)
        o_THv = run.attend(q_THd, k, v, self.scale, mask=self.mask, softcap=self.softcap, sinks_H=self.sinks)
        return self.o_proj(o_THv.flatten(1), run.reuse_linear)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held and own: as attention itself (`attention_bytes`); held besides what q_norm and k_norm take.

        Kept are attention's output and the linear layers' outputs.
        """
        q, k, D = self.q_proj.out_features, self.k_proj.out_features, self.o_proj.out_features
        heads = q // self.head_dim
        by_blocks = self.softcap is not None or self.sinks is not None
        shape = AttentionShape(
            heads, k // self.head_dim, self.head_dim, self.head_dim, self.mask.window, by_blocks
        )
        attend = attention_bytes(shape, dtype, device)
        normed = q + k if self.q_norm is not None else 0
        return Bytes(held=normed * dtype.itemsize, linear=(q + 2 * k + D) * dtype.itemsize) + attend


def attention_bytes(shape: AttentionShape, dtype: torch.dtype, device: str) -> Bytes:
    """Of attention between its projections, H query and G key heads, d and v wide.

    Held: q, k, v, the output and its float32 log-sum-exp per head. Own: gradients of the output and of q, k,
    v. A flash kernel on CUDA also sums dq in float32, and has dk and dv per query head until it adds up those
    of a group. Source: FlashAttention-2, arXiv:2307.08691, 3.1.
    Kept are output and log-sum-exp; nothing on CUDA, where a second visit computes them again.
    """
    size = dtype.itemsize
    heads, key_heads, width, value_width, *_ = shape
    q, k, v, o = heads * width, key_heads * width, key_heads * value_width, heads * value_width
    output = o * size + 4 * heads
    own = (o + q + k + v) * size
    if device == "cuda":
        own += 4 * q + (q + o) * size * (heads != key_heads)
    kept = 0 if device == "cuda" else output
    return Bytes((q + k + v) * size + output, own, expensive=kept, attention=shape)
