"""Sparse latent attention: an indexer chooses the keys that a token sees (DeepSeek-V3.2, GLM-5).

The arithmetic is kernels/sparse_attention.py. Documents and rows of at most K tokens are attended in full,
and no choice is made. T tokens, N cached positions, D model width, Q query latent, H heads; J indexer heads,
i their width, of which the first r elements rotate; K keys of a query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.decode_step.program import Row
from unfreeze.kernels.rotary import Pairing, rotary
from unfreeze.kernels.sparse_attention import Index, index_divergence
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.mla import MLA
from unfreeze.models.blocks.norm import LayerNorm
from unfreeze.models.blocks.passes import PackedPass, Pass
from unfreeze.models.blocks.recording import CannotRecord, Recording


class Indexer(Block):
    """Queries wq_b(query latent), one key norm(wk(x)), and weights of the heads, weights_proj(x) / √J.

    Its parameters are frozen; `train_indexers` (models/indexers.py) changes that. Its inputs are constants to
    it: no gradient goes through it into the rest of the model.
    """

    def __init__(
        self,
        *,
        heads: int,
        rope: int,
        pairs: Pairing,
        wq_b: Linear,
        wk: Linear,
        k_norm: LayerNorm,
        weights_proj: Linear,
    ):
        super().__init__()
        self.heads, self.rope = heads, rope
        self.pairs: Pairing = pairs
        self.wq_b, self.wk, self.k_norm, self.weights_proj = wq_b, wk, k_norm, weights_proj
        self.requires_grad_(False)

    def keys(self, x_TD: Tensor, run: Pass) -> Tensor:
        """-> [T, i], which is cached."""
        return self._rotated(self.k_norm(self.wk(x_TD))[:, None], run)[:, 0]

    def index(self, low_rank_TQ: Tensor, x_TD: Tensor, keys: Tensor, run: Pass) -> Index:
        """The index of every token. keys: those of the pass, cached ones included."""
        q_TJi = self._rotated(self.wq_b(low_rank_TQ).unflatten(-1, (self.heads, -1)), run)
        w_TJ = self.weights_proj(x_TD)
        w_TJ = w_TJ.to(torch.promote_types(w_TJ.dtype, torch.float32)) * self.heads**-0.5
        return Index(q_TJi, w_TJ, keys, q_TJi.shape[-1] ** -0.5)

    def _rotated(self, x_THi: Tensor, run: Pass) -> Tensor:
        turning, rest = x_THi.split((self.rope, x_THi.shape[-1] - self.rope), dim=-1)
        return torch.cat((rotary(turning.contiguous(), *run.tables(), self.pairs), rest), dim=-1)

    def cached(self) -> int:
        """Numbers that a position has in the cache: the indexer's key."""
        return self.wk.out_features


class SparseMLA(MLA):
    """MLA in which a token sees K keys: those that the layer's indexer chose, or that of an earlier layer.

    follows   the layer whose choice is used; None: this layer's `indexer` chooses
    followed  True if later layers use this layer's choice
    """

    def __init__(
        self,
        layer: int,
        *,
        chosen_keys: int,
        indexer: Indexer | None,
        follows: int | None = None,
        followed: bool = False,
        **parts: Any,
    ):
        super().__init__(layer, **parts)
        self.chosen_keys, self.indexer = chosen_keys, indexer
        self.follows, self.followed = follows, followed

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        low_rank_TQ = self.low_rank(x_TD, run)
        q_THd = self.query(low_rank_TQ, run)
        latent = self.latent(x_TD, run)
        narrower = run.longest > self.chosen_keys

        # the indexer's part, with the inputs as constants; nothing of it where nobody reads it
        divergence = run.taps is not None and "divergence" in run.taps.names
        index: Index | None = None
        with torch.set_grad_enabled(divergence and torch.is_grad_enabled()):
            new = (latent,)
            if self.indexer is not None and (narrower or divergence or run.caches):
                new = latent, self.indexer.keys(x_TD.detach(), run)
            latent, *keys = run.remember(self.layer, *new)
            if self.indexer is not None and (narrower or divergence):
                index = self.indexer.index(low_rank_TQ.detach(), x_TD.detach(), keys[0], run)
        chosen = self._choice(index, run) if narrower else None

        def attend(q_THd: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            if divergence and index is not None:
                self._tap_divergence(index, q_THd, k, chosen, run)
            if chosen is None:
                return run.attend(q_THd, k, v, scale)
            return run.attend_selected(q_THd, k, v, scale, chosen)

        return self.attended(q_THd, latent, run, attend)

    def _choice(self, index: Index | None, run: Pass) -> Tensor:
        """The chosen keys. Those that other layers use too stay in the pass: backward needs them again."""
        if self.follows is not None:
            return run.chosen[self.follows]
        assert index is not None
        if not self.followed:
            return run.select(index, self.chosen_keys)
        if self.layer not in run.chosen:
            run.chosen[self.layer] = run.select(index, self.chosen_keys)
        return run.chosen[self.layer]

    def _tap_divergence(self, index: Index, q: Tensor, k: Tensor, chosen: Tensor | None, run: Pass) -> None:
        assert isinstance(run, PackedPass) and run.taps is not None
        attention = q, k, self.scale
        run.taps.put("divergence", index_divergence(index, *attention, run.layout, chosen, self.chosen_keys))

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """As MLA, while no row of the cache can have more than K positions; no key is ever chosen there."""
        if to.cache.positions > self.chosen_keys:
            raise CannotRecord("a choice of keys")
        return super().record(to, x, add=add, factor=factor)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As MLA; what a choice adds is counted by the length of documents (AttentionShape.keys)."""
        counted = super().bytes(dtype, device)
        assert counted.attention is not None
        shape = counted.attention._replace(keys=self.chosen_keys)
        return Bytes(**{**vars(counted), "attention": shape})
