"""Attention to the last tokens and to compressed entries of earlier ones (DeepSeek-V4).

The arithmetic is kernels/compressed. One head of keys, which are the values too; each query head has a sink.
The last r elements of queries, keys and entries rotate; an output is rotated back by its own position, so it
depends on distances only. T tokens, E entries, D model width, Q query latent, H heads of d; J heads of the
indexer, i their width; m tokens of a window; g groups of heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.kernels.attention import Mask
from unfreeze.kernels.rotary import rotary
from unfreeze.kernels.sparse_attention import Index
from unfreeze.models.blocks.bytes import AttentionShape, Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.norm import PlainRMSNorm, RMSNorm
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.step_pass import Tables


class GroupedLinear(Linear):
    """y_j = W_j x_j of each group j: weight [g · O, I], x [T, g, I] -> y [T, g, O]. It carries no adapter."""

    groups: int
    adaptable = False

    def forward(self, x_TgI: Tensor, reuse: object = None) -> Tensor:
        if self.codec is None and self.widened is None:
            return _grouped(x_TgI, self.weight, self.groups)
        return _FrozenGrouped.apply(x_TgI, self)


def _grouped(x_TgI: Tensor, weight: Tensor, groups: int) -> Tensor:
    return (x_TgI.transpose(0, 1) @ weight.unflatten(0, (groups, -1)).mT).transpose(0, 1)


class _FrozenGrouped(torch.autograd.Function):
    """The same with a packed or narrower weight, widened in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x_TgI: Tensor, linear: GroupedLinear) -> Tensor:
        ctx.linear = linear
        return _grouped(x_TgI, linear.matrix(), linear.groups)

    @staticmethod
    def backward(ctx: Any, dy_TgO: Tensor) -> tuple[Tensor, None]:
        weight_gOI = ctx.linear.matrix().unflatten(0, (ctx.linear.groups, -1))
        return (dy_TgO.transpose(0, 1) @ weight_gOI).transpose(0, 1), None


class PositionBias(nn.Module):
    """A number of each token of a window and channel, [m, C]; float32 whatever the computation's dtype."""

    float32 = True  # parallel/placement/fsdp.py gathers it as it is

    def __init__(self, rate: int, channels: int, *, device: torch.device | str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rate, channels, dtype=torch.float32, device=device))

    def forward(self) -> Tensor:
        """A copy: FSDP2 frees the gathered parameter when the call returns."""
        return self.weight.clone()

    def drawn(self, generator: torch.Generator) -> dict[str, Tensor]:
        """First values: 0."""
        return {"weight": torch.zeros(self.weight.shape)}


class Compressor(Block):
    """Entries of windows of m tokens: the norm of their mean, rotated by the window's first position.

    kv_proj and gate_proj give d channels, or 2 d if windows overlap. table: name of its rotary table.
    """

    def __init__(
        self,
        *,
        rate: int,
        overlap: bool,
        table: str,
        kv_proj: Linear,
        gate_proj: Linear,
        position_bias: PositionBias,
        kv_norm: RMSNorm,
        indexer: EntryIndexer | None = None,
    ):
        super().__init__()
        self.rate, self.overlap, self.table = rate, overlap, table
        self.kv_proj, self.gate_proj, self.kv_norm = kv_proj, gate_proj, kv_norm
        self.position_bias, self.indexer = position_bias, indexer

    def forward(self, x_TD: Tensor, run: Pass, name: str) -> Tensor:
        """-> [E, d]; `name` is that of its state in a cache."""
        x_TC, z_TC = self.kv_proj(x_TD, run.reuse_linear), self.gate_proj(x_TD, run.reuse_linear)
        e_Ed = run.pool(name, x_TC, z_TC, self.position_bias(), self.rate, overlap=self.overlap)
        return rotated(self.kv_norm(e_Ed), run.tables_of_entries(self.table, self.rate))

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: the channels of each token as they lie in windows. Own: their gradients, in float32 too."""
        C, size = self.kv_proj.out_features, dtype.itemsize
        return Bytes(held=2 * C * size, own=2 * C * (size + 4), linear=2 * C * size)

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row's last tokens, of which its next entry is made."""
        return (self.rate * (1 + self.overlap) - 1) * 2 * self.kv_proj.out_features * dtype.itemsize


class Scorer(nn.Module):
    """Holds weights_proj, under the name that it has in checkpoints."""

    def __init__(self, weights_proj: Linear):
        super().__init__()
        self.weights_proj = weights_proj


class EntryIndexer(Compressor):
    """Chooses K entries per query: keys are entries of its own, of width i. Its parameters stay frozen."""

    def __init__(self, *, heads: int, keys: int, q_b_proj: Linear, weights_proj: Linear, **parts: Any):
        super().__init__(**parts)
        self.heads, self.keys = heads, keys
        self.q_b_proj, self.scorer = q_b_proj, Scorer(weights_proj)
        for linear in (self.kv_proj, self.gate_proj, q_b_proj, weights_proj):
            linear.adaptable = False
        self.requires_grad_(False)

    def index(self, low_rank_TQ: Tensor, x_TD: Tensor, keys: Tensor, run: Pass) -> Index:
        """The index of every token; keys: its entries, those cached included."""
        q_TJi = rotated(self.q_b_proj(low_rank_TQ).unflatten(-1, (self.heads, -1)), run.tables(self.table))
        w_TJ = self.scorer.weights_proj(x_TD)
        w_TJ = w_TJ.to(torch.promote_types(w_TJ.dtype, torch.float32)) * self.heads**-0.5
        return Index(q_TJi, w_TJ, keys, q_TJi.shape[-1] ** -0.5)


@dataclass(frozen=True)
class Sizes:
    """heads H of width d; window: tokens that a query sees; groups g of the output projection."""

    heads: int
    head_dim: int
    window: int
    groups: int


class CompressedAttention(Block):
    """Attention to a window and, with a compressor, to entries; with an indexer, to the K best of them.

    table: name of the rotary table of queries and keys.
    """

    def __init__(
        self,
        layer: int,
        sizes: Sizes,
        table: str,
        *,
        q_a_proj: Linear,
        q_a_norm: RMSNorm,
        q_b_proj: Linear,
        q_b_norm: PlainRMSNorm,
        kv_proj: Linear,
        kv_norm: RMSNorm,
        sinks: nn.Parameter,
        o_a_proj: GroupedLinear,
        o_b_proj: Linear,
        compressor: Compressor | None,
    ):
        super().__init__()
        self.layer, self.sizes, self.table = layer, sizes, table
        self.q_a_proj, self.q_a_norm, self.q_b_proj, self.q_b_norm = q_a_proj, q_a_norm, q_b_proj, q_b_norm
        self.kv_proj, self.kv_norm, self.sinks = kv_proj, kv_norm, sinks
        self.o_a_proj, self.o_b_proj, self.compressor = o_a_proj, o_b_proj, compressor
        self.mask = Mask(sizes.window)

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        tables = run.tables(self.table)
        low_TQ = self.q_a_norm(self.q_a_proj(x_TD, run.reuse_linear))
        q_THd = self.q_b_proj(low_TQ, run.reuse_linear).unflatten(-1, (self.sizes.heads, -1))
        q_THd = rotated(self.q_b_norm(q_THd), tables)
        k_Td = rotated(self.kv_norm(self.kv_proj(x_TD, run.reuse_linear)), tables)

        o_THd = rotated_back(self.attended(x_TD, low_TQ, q_THd, k_Td, run), tables)
        low_TgO = self.o_a_proj(o_THd.flatten(1).unflatten(-1, (self.sizes.groups, -1)))
        return self.o_b_proj(low_TgO.flatten(1), run.reuse_linear)

    def attended(self, x_TD: Tensor, low_TQ: Tensor, q_THd: Tensor, k_Td: Tensor, run: Pass) -> Tensor:
        """o [T, H, d] over the keys of tokens and, with a compressor, of entries."""
        scale, compressor = self.sizes.head_dim**-0.5, self.compressor
        if compressor is None:
            (k,) = run.remember(self.layer, k_Td[:, None])
            return run.attend(q_THd, k, k, scale, mask=self.mask, sinks_H=self.sinks)
        rate, indexer = compressor.rate, compressor.indexer
        new = [compressor(x_TD, run, f"{self.layer} entries")]
        chosen = None
        with torch.no_grad():  # a choice has no gradient
            narrower = indexer is not None and run.longest // rate > indexer.keys
            if indexer is not None and (narrower or run.caches):
                new.append(indexer(x_TD, run, f"{self.layer} index"))
        k, e, *keys = run.remember_entries(self.layer, rate, k_Td, *new)
        if indexer is not None and narrower:

            def choose() -> Tensor | None:
                with torch.no_grad():
                    index = indexer.index(low_TQ, x_TD, keys[0], run)
                    return run.select_entries(index, indexer.keys, rate)

            chosen = run.reuse(choose)
        return run.attend_entries(q_THd, k, e, self.sinks, scale, self.sizes.window, rate, chosen)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: queries before norm and after rotation, and the output; rotated back too, if o_a_proj trains.

        Also both latents, the keys, and a float32 per head and token. Own: gradients of queries and output.
        """
        H, d, size = self.sizes.heads, self.sizes.head_dim, dtype.itemsize
        Q, O = self.q_a_proj.out_features, self.o_b_proj.in_features
        trains = self.o_a_proj.codec is None and self.o_a_proj.weight.requires_grad
        projections = Bytes(
            held=((3 + trains) * H * d + 2 * Q + 3 * d + O) * size + 4 * H,
            own=2 * H * d * size,
            expensive=H * d * size + 4 * H,
            linear=(H * d + Q + d) * size,
            attention=AttentionShape(H, 1, d, d, window=self.sizes.window, by_blocks=True),
        )
        if self.compressor is None:
            return projections
        return projections + self.compressor.bytes(dtype, device)

    def cached(self) -> int:
        """The key of a token; the entry of its window lies beside that of the last one, and the indexer's."""
        if self.compressor is None:
            return self.sizes.head_dim
        indexer = self.compressor.indexer
        return 2 * self.sizes.head_dim + (0 if indexer is None else indexer.kv_norm.size)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the last tokens of which the next entries are made."""
        if self.compressor is None:
            return 0
        parts = (self.compressor, self.compressor.indexer)
        return sum(part.entry_bytes(dtype) for part in parts if part is not None)


def rotated(x: Tensor, tables: Tables) -> Tensor:
    """x [T, H, d] or [T, d] with its last r elements rotated, adjacent ones in pairs; halves last."""
    x_THd = x if x.dim() == 3 else x[:, None]
    return rotary(x_THd, *tables, "adjacent").view_as(x)


def rotated_back(x_THd: Tensor, tables: Tables) -> Tensor:
    """The inverse of `rotated` at the token's own position: pairs are adjacent again."""
    cos_Tr, sin_Tr = tables
    y_THd, width = rotary(x_THd, cos_Tr, -sin_Tr, "halves"), 2 * cos_Tr.shape[-1]
    rest, turned = y_THd[..., :-width], y_THd[..., -width:]
    return torch.cat((rest, turned.unflatten(-1, (2, -1)).mT.flatten(-2)), dim=-1)
