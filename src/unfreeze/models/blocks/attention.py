"""Multi-head attention with grouped keys and values (GQA) and rotary positions.

T tokens, D model width, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.kernels.attention import CAUSAL, Mask
from unfreeze.kernels.decode_step.program import Heads, Row
from unfreeze.kernels.packed_attention import bucket, in_one_call
from unfreeze.kernels.recompute import recomputed
from unfreeze.kernels.rotary import Pairing, rotary
from unfreeze.models.blocks.bytes import AttentionShape, Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.moba import MixtureOfBlocks
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recording import PAIRINGS, CannotRecord, Recording


class Attending(Block):
    """Attention after its projections: y = o_proj(softmax(scale · q kᵀ) v), q and k rotated in `pairs`.

    scale    None: 1/sqrt(d)
    rope     name of the rotary tables (`Shape.ropes`); "": the model's own; None: a layer without rotation
    query_rope   name of the tables for q, if they differ from k's: those that grow with the position
    mask     a sliding window or chunks; softcap: cap · tanh(score / cap)
    sinks    [H], a learned score per head that takes its share of the softmax (gpt-oss)
    blocks   a query sees chosen blocks of tokens only (moba.py); None: all that the mask leaves
    """

    o_proj: Linear  # registered after the other projections: modules are listed in this order

    def __init__(
        self,
        layer: int,
        head_dim: int,
        *,
        scale: float | None = None,
        rope: str | None = "",
        query_rope: str | None = None,
        mask: Mask = CAUSAL,
        softcap: float | None = None,
        sinks: nn.Parameter | None = None,
        pairs: Pairing = "halves",
    ):
        super().__init__()
        self.layer, self.head_dim = layer, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.rope, self.query_rope = rope, rope if query_rope is None else query_rope
        self.mask, self.softcap, self.sinks = mask, softcap, sinks
        self.pairs: Pairing = pairs
        self.blocks: MixtureOfBlocks | None = None

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, run: Pass) -> Tensor:
        """Rotate, update the cache, attend, apply o_proj. -> [T, D]."""
        return self.o_proj(self.mix(q_THd, k_TGd, v_TGv, run), run.reuse_linear)

    def mix(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, run: Pass) -> Tensor:
        """Rotate, update the cache, attend. -> [T, H v]."""
        run.unrotated(q_THd, k_TGd)
        if self.query_rope is not None:
            q_THd = rotary(q_THd, *run.tables(self.query_rope), self.pairs)
        if self.rope is not None:
            k_TGd = rotary(k_TGd, *run.tables(self.rope), self.pairs)
        k, v = run.remember(self.layer, k_TGd, v_TGv)
        if self.blocks is not None:
            return self.blocks(q_THd, k, v, run, self.scale).flatten(1)
        o_THv = run.attend(q_THd, k, v, self.scale, mask=self.mask, softcap=self.softcap, sinks_H=self.sinks)
        return o_THv.flatten(1)

    def record_attend(self, to: Recording, q: Row, k: Row, v: Row, *, add: Row | None, factor: float) -> Row:
        """`attend` for a step: add + factor · o_proj(…).

        With blocks only while no row of the cache can have so many positions that some are left out.
        """
        if self.blocks is not None and to.cache.positions > self.blocks.limit:
            raise CannotRecord("a choice of blocks")
        program, width = to.program, self.head_dim
        keys, values = to.stores(self.layer)
        heads, groups, pairing = q.width // width, k.width // width, PAIRINGS[self.pairs]
        q = program.rotate(q, heads, to.tables(self.query_rope), pairing, packed=True)
        program.rotate(k, groups, to.tables(self.rope), pairing, cache=keys)
        program.rotate(v, groups, None, pairing, cache=values)
        o = program.attend(
            q,
            keys,
            values,
            self.scale,
            Heads(heads, groups, width, v.width // groups),
            mask=self.mask,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return self.o_proj.record(to, o, add=add, factor=factor)

    def cached(self) -> int:
        """Numbers that a position has in the cache: its keys and values."""
        shape = self.bytes(torch.float32, "cpu").attention
        assert shape is not None
        return shape.key_heads * (shape.width + shape.value_width)

    def attend_bytes(
        self, heads: int, key_heads: int, dtype: torch.dtype, device: str, value_width: int | None = None
    ) -> Bytes:
        """Bytes of `attend` between the projections; o_proj counts its own. Values are d wide by default."""
        softcap, sinks, d = self.softcap is not None, self.sinks is not None, self.head_dim
        v = d if value_width is None else value_width
        name = bucket(d, v, window=self.mask.window is not None, softcap=softcap, sinks=sinks)
        one_call = in_one_call(device, dtype, name)
        # torch's flash kernel takes sinks on a CPU (kernels/packed_attention/by_buckets.py)
        by_blocks = softcap or (sinks and device != "cpu" and not one_call)
        window = None if one_call else self.mask.window
        shape = AttentionShape(heads, key_heads, d, v, window, by_blocks, one_call)
        if self.blocks is not None:
            shape = shape._replace(blocks=(self.blocks.block, self.blocks.chosen))
        product = Bytes(linear=self.o_proj.out_features * dtype.itemsize)
        return product + attention_bytes(shape, dtype, device)


class Attention(Attending):
    """Attention with separate projections for q, k and v.

    q_norm, k_norm   per head, before the rotation (Qwen3). `parts` as in Attending.
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
        **parts: Any,
    ):
        super().__init__(layer, head_dim, **parts)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = q_proj, k_proj, v_proj, o_proj
        self.q_norm, self.k_norm = q_norm, k_norm

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        q_THd = self.q_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        k_TGd = self.k_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        v_TGv = self.v_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TGd = self.q_norm(q_THd), self.k_norm(k_TGd)
        return self.attend(q_THd, k_TGd, v_TGv, run)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · attention(x)."""
        q, k, v = (linear.record(to, x) for linear in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.record_norms(to, q, k, self.q_norm, self.k_norm)
        return self.record_attend(to, q, k, v, add=add, factor=factor)

    def record_norms(
        self, to: Recording, q: Row, k: Row, q_norm: RMSNorm, k_norm: RMSNorm
    ) -> tuple[Row, Row]:
        """The norms of q and k, head by head."""
        width = self.head_dim
        return q_norm.record(to, q, q.width // width), k_norm.record(to, k, k.width // width)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held and own: as for attention itself (`attention_bytes`); q_norm and k_norm add theirs to held.

        Recomputation keeps attention's output and the linear layers' outputs.
        """
        q, k = self.q_proj.out_features, self.k_proj.out_features
        normed = q + k if self.q_norm is not None else 0
        projections = Bytes(held=normed * dtype.itemsize, linear=(q + 2 * k) * dtype.itemsize)
        return projections + self.attend_bytes(q // self.head_dim, k // self.head_dim, dtype, device)


class ScaledValueAttention(Attention):
    """Attention whose values have another width than keys, v, and a factor (MiMo-V2-Flash)."""

    def __init__(self, layer: int, head_dim: int, *, value_width: int, value_scale: float, **parts: Any):
        super().__init__(layer, head_dim, **parts)
        self.value_width, self.value_scale = value_width, value_scale

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        q_THd = self.q_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        k_TGd = self.k_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        v_TGv = self.v_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.value_width))
        return self.attend(q_THd, k_TGd, v_TGv * self.value_scale, run)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · attention(x)."""
        q, k, v = (linear.record(to, x) for linear in (self.q_proj, self.k_proj, self.v_proj))
        v = to.program.combine(v, a=self.value_scale)
        return self.record_attend(to, q, k, v, add=add, factor=factor)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As Attention, with narrower values.

        torch's CPU kernel, which a window does not use, pads values and output; o_proj keeps a copy of it.
        """
        q, k, v = (linear.out_features for linear in (self.q_proj, self.k_proj, self.v_proj))
        heads, width = q // self.head_dim, self.head_dim
        padded = heads * (2 * width - self.value_width) if device == "cpu" and not self.mask.window else 0
        projections = Bytes(held=padded * dtype.itemsize, linear=(q + k + v) * dtype.itemsize)
        return projections + self.attend_bytes(heads, k // width, dtype, device, self.value_width)


class GatedAttention(Attention):
    """Attention with a gate: o_proj(sigmoid(gate) · o). q_proj gives q and gate of each head (Qwen3-Next).

    Source: arXiv:2505.06708.
    """

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """A step of generation calls forward: the program has no operation for a gate."""
        raise CannotRecord("gated attention")

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        both_THd = self.q_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, 2 * self.head_dim))
        q_THd, gate_THd = both_THd.split(self.head_dim, -1)
        k_TGd = self.k_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        v_TGv = self.v_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        o_TH = self.mix(self.q_norm(q_THd), self.k_norm(k_TGd), v_TGv, run)
        return self.o_proj(recomputed(gated, o_TH, gate_THd.flatten(1)), run.reuse_linear)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As Attention; the first product also has the gate, of which a copy and the gated output stay."""
        double, k = self.q_proj.out_features, self.k_proj.out_features
        q = double // 2
        projections = Bytes(
            held=(double + 2 * q + k) * dtype.itemsize,
            own=double * dtype.itemsize,
            linear=(double + 2 * k) * dtype.itemsize,
        )
        return projections + self.attend_bytes(q // self.head_dim, k // self.head_dim, dtype, device)


def gated(o: Tensor, gate: Tensor) -> Tensor:
    """sigmoid(gate) · o in o's dtype."""
    return o * gate.sigmoid()


class WideNormAttention(Attention):
    """Attention whose q_norm and k_norm act on all heads at once, before they are split (OLMo 2)."""

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        q_TH = self.q_norm(self.q_proj(x_TD, run.reuse_linear))
        k_TG = self.k_norm(self.k_proj(x_TD, run.reuse_linear))
        v_TG = self.v_proj(x_TD, run.reuse_linear)
        q_THd, k_TGd, v_TGv = (part.unflatten(-1, (-1, self.head_dim)) for part in (q_TH, k_TG, v_TG))
        return self.attend(q_THd, k_TGd, v_TGv, run)

    def record_norms(
        self, to: Recording, q: Row, k: Row, q_norm: RMSNorm, k_norm: RMSNorm
    ) -> tuple[Row, Row]:
        """The norms of q and k, all heads at once."""
        return q_norm.record(to, q), k_norm.record(to, k)


class NormedValueAttention(Attending):
    """Attention that norms the values too; without v_proj the values are the projected keys (Gemma 4)."""

    def __init__(
        self,
        layer: int,
        head_dim: int,
        *,
        q_proj: Linear,
        k_proj: Linear,
        v_proj: Linear | None,
        o_proj: Linear,
        q_norm: RMSNorm,
        k_norm: RMSNorm,
        v_norm: RMSNorm,
        **parts: Any,
    ):
        super().__init__(layer, head_dim, **parts)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = q_proj, k_proj, v_proj, o_proj
        self.q_norm, self.k_norm, self.v_norm = q_norm, k_norm, v_norm

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        q_THd = self.q_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        k_TGd = v_TGd = self.k_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        if self.v_proj is not None:
            v_TGd = self.v_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        return self.attend(self.q_norm(q_THd), self.k_norm(k_TGd), self.v_norm(v_TGd), run)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · attention(x)."""
        q, k = self.q_proj.record(to, x), self.k_proj.record(to, x)
        v = k if self.v_proj is None else self.v_proj.record(to, x)
        norms = (self.q_norm, q), (self.k_norm, k), (self.v_norm, v)
        q, k, v = (norm.record(to, part, part.width // self.head_dim) for norm, part in norms)
        return self.record_attend(to, q, k, v, add=add, factor=factor)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As Attention with norms, plus a norm of the values."""
        q, k = self.q_proj.out_features, self.k_proj.out_features
        v = 0 if self.v_proj is None else k
        projections = Bytes(held=(q + k + v) * dtype.itemsize, linear=(q + k + v) * dtype.itemsize)
        return projections + self.attend_bytes(q // self.head_dim, k // self.head_dim, dtype, device)


class FusedAttention(Attending):
    """Attention with one projection for q, k and v, concatenated in this order (Phi-3)."""

    def __init__(
        self,
        layer: int,
        head_dim: int,
        heads: int,
        key_heads: int,
        *,
        qkv_proj: Linear,
        o_proj: Linear,
        **parts: Any,
    ):
        super().__init__(layer, head_dim, **parts)
        self.heads, self.key_heads, self.qkv_proj, self.o_proj = heads, key_heads, qkv_proj, o_proj

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        qkv_THd = self.qkv_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
        q_THd, k_TGd, v_TGv = qkv_THd.split((self.heads, self.key_heads, self.key_heads), dim=1)
        # copy v: a view would keep the whole product alive until backward, q and k a second time
        return self.attend(q_THd, k_TGd, v_TGv.contiguous(), run)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · attention(x)."""
        qkv, width = self.qkv_proj.record(to, x), self.head_dim
        q, k = self.heads * width, self.key_heads * width
        parts = qkv.part(0, q), qkv.part(q, k), qkv.part(q + k, k)
        return self.record_attend(to, *parts, add=add, factor=factor)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As Attention."""
        product = Bytes(linear=self.qkv_proj.out_features * dtype.itemsize)
        return product + self.attend_bytes(self.heads, self.key_heads, dtype, device)


def attention_bytes(shape: AttentionShape, dtype: torch.dtype, device: str) -> Bytes:
    """Bytes of attention between its projections: H query heads, G key heads, widths d and v.

    Held: q, k, v, the output and its float32 log-sum-exp per head. Own: gradients of the output and of q, k,
    v. A flash kernel on CUDA also sums dq in float32, and holds dk and dv per query head until it sums those
    of a group. In one call it takes equal widths: narrower v, output and its gradient are padded, and dv is
    as wide. Source: FlashAttention-2, arXiv:2307.08691, 3.1.

    Recomputation keeps output and log-sum-exp; not where torch's own function runs on CUDA, which computes
    them again.
    """
    size = dtype.itemsize
    heads, key_heads, width, value_width, window, by_blocks, one_call, _, _ = shape
    q, k, v, o = heads * width, key_heads * width, key_heads * value_width, heads * value_width
    output = o * size + 4 * heads
    held = (q + k + v) * size + output
    own = (o + q + k + v) * size
    if device == "cuda":
        own += 4 * q + (q + o) * size * (heads != key_heads)
    if one_call and value_width < width:
        own += (2 * q + k + (k - v)) * size + (q - o) * size * (heads != key_heads)
    computed_again = device == "cuda" and window is None and not (one_call or by_blocks)
    return Bytes(held, own, expensive=0 if computed_again else output, attention=shape)
