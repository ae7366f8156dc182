"""Residual streams: a layer's input is N copies of the residual, mixed by weights that depend on the token.

Manifold-constrained hyper-connections (mHC), with X [N, D] the streams of a token and n = rms(X flattened):

    pre  [N]     sigmoid(a_1 · W_1 n + b_1) + eps                  y = Σ_i pre_i X_i is the block's input
    post [N]     2 · sigmoid(a_2 · W_2 n + b_2)
    comb [N, N]  Sinkhorn(softmax(a_3 · W_3 n + b_3) + eps)        rows and columns sum to 1
    X' = combᵀ X + post ⊗ block(y)

They are computed in float32 and kept in it. Sources: arXiv:2512.24880; DeepSeek-V4's report, 2.2;
transformers 5.23, models/deepseek_v4.

T tokens, N streams, D model width. Between layers the streams of a token lie side by side, [T, N · D].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.kernels.decode_step.program import Row
from unfreeze.kernels.recompute import recomputed
from unfreeze.models.blocks.bytes import Bytes
from unfreeze.models.blocks.embedding import Embedding
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recording import Recording
from unfreeze.models.layer import Layer


class HyperConnection(nn.Module):
    """post [T, N], comb [T, N, N] and the block's input [T, D] from the streams.

    fn [(2 + N) N, N D], base [(2 + N) N] and scale [3] hold pre, post and comb one behind the other.
    """

    float32 = True  # parallel/placement/fsdp.py gathers its parameters as they are

    def __init__(
        self,
        hidden_size: int,
        *,
        streams: int,
        iterations: int,
        eps: float,
        norm_eps: float,
        device: torch.device | str,
    ):
        super().__init__()
        self.streams, self.iterations, self.eps, self.norm_eps = streams, iterations, eps, norm_eps
        rows = (2 + streams) * streams
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.fn = nn.Parameter(torch.empty(rows, streams * hidden_size, **options))
        self.base = nn.Parameter(torch.empty(rows, **options))
        self.scale = nn.Parameter(torch.empty(3, **options))

    def forward(self, x_TM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        N = self.streams
        x_TM = x_TM.view_as(
            x_TM
        )  # gradients of its two uses are summed first, as FSDP2 does: in bf16 it shows
        z_TZ = recomputed(self._weights, x_TM, shared=(self.fn, self.base, self.scale))
        pre_TN, post_TN, comb_TM = z_TZ.split((N, N, N * N), dim=-1)
        y_TD = collapsed(x_TM, pre_TN)
        return post_TN, comb_TM.unflatten(-1, (N, N)), y_TD

    def _weights(self, x_TM: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> Tensor:
        """pre, post and comb of each token, [T, 2 N + N²]."""
        N = self.streams
        z_TZ = _projected(x_TM, fn, self.norm_eps)
        parts = zip(z_TZ.split((N, N, N * N), -1), scale, base.split((N, N, N * N)), strict=True)
        pre_TN, post_TN, comb_TM = (z * a + b for z, a, b in parts)
        comb_TNN = comb_TM.unflatten(-1, (N, N)).softmax(-1) + self.eps
        comb_TNN = comb_TNN / (comb_TNN.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):  # Sinkhorn and Knopp: rows and columns in turn
            comb_TNN = comb_TNN / (comb_TNN.sum(-1, keepdim=True) + self.eps)
            comb_TNN = comb_TNN / (comb_TNN.sum(-2, keepdim=True) + self.eps)
        return torch.cat((pre_TN.sigmoid() + self.eps, 2 * post_TN.sigmoid(), comb_TNN.flatten(1)), dim=-1)

    def drawn(self, generator: torch.Generator) -> dict[str, Tensor]:
        """First values: fn ~ N(0, 0.02²), base 0, scale 1."""
        fn = torch.randn(self.fn.shape, generator=generator) * 0.02
        return {"fn": fn, "base": torch.zeros(self.base.shape), "scale": torch.ones(3)}


class StreamHead(nn.Module):
    """The streams' weighted sum behind the last layer, [T, N D] -> [T, D], with pre as in HyperConnection."""

    float32 = True

    def __init__(
        self, hidden_size: int, *, streams: int, eps: float, norm_eps: float, device: torch.device | str
    ):
        super().__init__()
        self.streams, self.eps, self.norm_eps = streams, eps, norm_eps
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.hc_fn = nn.Parameter(torch.empty(streams, streams * hidden_size, **options))
        self.hc_base = nn.Parameter(torch.empty(streams, **options))
        self.hc_scale = nn.Parameter(torch.empty(1, **options))

    def forward(self, x_TM: Tensor) -> Tensor:
        def weights(x_TM: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> Tensor:
            return (_projected(x_TM, fn, self.norm_eps) * scale + base).sigmoid() + self.eps

        return collapsed(x_TM, recomputed(weights, x_TM, shared=(self.hc_fn, self.hc_base, self.hc_scale)))

    def drawn(self, generator: torch.Generator) -> dict[str, Tensor]:
        """First values, as in HyperConnection."""
        fn = torch.randn(self.hc_fn.shape, generator=generator) * 0.02
        return {"hc_fn": fn, "hc_base": torch.zeros(self.streams), "hc_scale": torch.ones(1)}


class StreamEmbedding(Embedding):
    """The token's row as each of N streams, [T, N D]."""

    def __init__(self, vocab_size: int, hidden_size: int, streams: int, **options: Any):
        super().__init__(vocab_size, hidden_size, **options)
        self.streams = streams

    def forward(self, tokens_T: Tensor) -> Tensor:
        return super().forward(tokens_T).repeat(1, self.streams)


class StreamNorm(RMSNorm):
    """The norm behind the last layer, of the streams' sum."""

    hc_head: StreamHead

    def forward(self, x_TM: Tensor) -> Tensor:
        return super().forward(self.hc_head(x_TM))

    def record(self, to: Recording, x: Row, groups: int = 1) -> Row:
        summed = to.called(self.hc_head, x, self.size)
        return super().record(to, summed, groups)


class StreamLayer(Layer):
    """Attention and MLP between hyper-connections (DeepSeek-V4)."""

    def __init__(self, *, attn_hc: HyperConnection, ffn_hc: HyperConnection, **parts: Any):
        super().__init__(**parts)
        self.attn_hc, self.ffn_hc = attn_hc, ffn_hc

    def forward(self, x_TM: Tensor, run: Pass) -> Tensor:
        post_TN, comb_TNN, y_TD = self.attn_hc(x_TM)
        x_TM = mixed(x_TM, self.attention(self.input_layernorm(y_TD), run), post_TN, comb_TNN)
        post_TN, comb_TNN, y_TD = self.ffn_hc(x_TM)
        return mixed(x_TM, self.mlp(self.post_attention_layernorm(y_TD), run), post_TN, comb_TNN)

    def record(self, to: Recording, x: Row) -> Row:
        """A step calls forward: the program has no operation for the streams."""
        present = to.present
        return to.called(lambda x_SM: self(x_SM, present.run), x, x.width)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Its parts in order, and the streams.

        Held: the streams before and between the two halves, the two blocks' inputs and outputs, and the
        weights of both in float32. Own: a gradient of the streams, and their float32 copies in one product.
        """
        D, N = self.input_layernorm.size, self.attn_hc.streams
        weights = 2 * (2 + N) * N * 4
        streams = Bytes(
            held=2 * (N + 2) * D * dtype.itemsize + weights, own=(2 * N * dtype.itemsize + 4 * N) * D
        )
        parts = (self.input_layernorm, self.attention, self.post_attention_layernorm, self.mlp)
        return sum((part.bytes(dtype, device) for part in parts), streams)


def collapsed(x_TM: Tensor, pre_TN: Tensor) -> Tensor:
    """y = Σ_i pre_i X_i, [T, D] in x's dtype."""

    def compute(x: Tensor, pre: Tensor) -> Tensor:
        return (pre[..., None] * x.unflatten(-1, (pre.shape[-1], -1))).sum(-2).to(x.dtype)

    return recomputed(compute, x_TM, pre_TN)


def mixed(x_TM: Tensor, y_TD: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """X' = combᵀ X + post ⊗ y, [T, N D] in x's dtype."""

    def compute(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        x_TND = x.unflatten(-1, (post.shape[-1], -1))
        kept_TND = comb.to(x.dtype).mT @ x_TND
        return (kept_TND + post.to(x.dtype)[..., None] * y[..., None, :]).flatten(-2)

    return recomputed(compute, x_TM, y_TD, post_TN, comb_TNN)


def _projected(x_TM: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fn · rms(x) in float32 or wider."""
    wide_TM = x_TM.to(torch.promote_types(x_TM.dtype, torch.float32))
    wide_TM = wide_TM * (wide_TM.square().mean(-1, keepdim=True) + eps).rsqrt()
    return F.linear(wide_TM, fn.to(wide_TM.dtype))
