"""The three ways through a decoder: packed (training, scoring), prefill (packed, and written to the cache)
and step (one new token per sequence; also at a fixed width).

A pass is given to every layer. It holds the rotary tables, what attention may look at, and the cache; layers
don't ask which pass it is.

T tokens, S sequences, N cached positions, H query heads, G key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.core.errors import UserError
from unfreeze.kernels.attention import Layout, packed_attention
from unfreeze.models.blocks.memo import Memo

Value = TypeVar("Value")
LatentForm = Literal["expanded", "absorbed"]
"""Latent attention (mla.py) over many queries makes each token's keys and values once; with one query per sequence it asks the latents themselves."""


class Cache:
    """What attention remembers of S sequences: per layer a few tensors [S, capacity, …] (keys and values, or MLA's latent with its rotary key).

    `lengths` (host) is how many positions of each row are filled. Rows are independent; `keep` lets go of the others.
    """

    def __init__(self, num_sequences: int, capacity: int):
        self.lengths = [0] * num_sequences
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, ...]] = {}

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for tensors in self.layers.values() for t in tensors)

    def write(self, layer: int, rows_T: Tensor, positions_T: Tensor, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Store one value per token at (row, position); the layer's tensors are allocated on first use."""
        if layer not in self.layers:
            size = (len(self.lengths), self.capacity)
            self.layers[layer] = tuple(value.new_zeros(*size, *value.shape[1:]) for value in new)
        for store, value in zip(self.layers[layer], new, strict=True):
            store[rows_T, positions_T] = value
        return self.layers[layer]

    def require_room(self) -> None:
        """Raise UserError where a row has no position left."""
        if max(self.lengths) >= self.capacity:
            raise UserError(f"the cache holds {self.capacity} positions and all are filled; create it with a larger capacity")

    def keep(self, rows: list[int]) -> list[int]:
        """Keep only these rows: finished sequences leave the batch. -> for each row of the cache now, which
        one it was.

        The last rows move into the freed places; nothing else is copied (of 16 rows, one of which ends: at
        most one). The memory is given back with the whole cache.
        """
        stays, moves = {row for row in rows if row < len(rows)}, sorted(row for row in rows if row >= len(rows))
        order = [row if row in stays else moves.pop() for row in range(len(rows))]
        for place, row in enumerate(order):
            if place != row:
                for store in (store for tensors in self.layers.values() for store in tensors):
                    store[place, : self.lengths[row]] = store[row, : self.lengths[row]]
        self.lengths = [self.lengths[row] for row in order]
        self.layers = {layer: tuple(store[: len(order)] for store in tensors) for layer, tensors in self.layers.items()}
        return order


@dataclass
class PackedPass:
    """Every document attends to itself only; nothing is remembered.

    memo    None, or where the layer being visited puts (first visit) and finds (second visit) what it need
            not recompute
    chunks  the same pass in parts of whole documents, (tokens, pass over them), for going through a layer in
            parts
    """

    cos_Tr: Tensor
    sin_Tr: Tensor
    layout: Layout
    memo: Memo | None = None
    chunks: tuple[tuple[slice, PackedPass], ...] = ()
    latent: ClassVar[LatentForm] = "expanded"

    @contextmanager
    def visiting(self, memo: Memo) -> Iterator[None]:
        """Within it, `once` and `kept` refer to this memo."""
        before, self.memo = self.memo, memo
        try:
            yield
        finally:
            self.memo = before

    def once(self, compute: Callable[[], Value]) -> Value:
        """compute(), but not again when the layer is recomputed: for results that must not differ (chosen
        experts) and for counters."""
        return compute() if self.memo is None else self.memo.once(compute)

    @property
    def kept(self) -> Callable[[Callable[[], Any]], Any] | None:
        """`once` for outputs of attention and experts, if those are kept; else None."""
        return self.memo.once if self.memo is not None and self.memo.dear else None

    @property
    def products(self) -> Callable[[Callable[[], Any]], Any] | None:
        """`once` for outputs of linear layers, if those are kept; else None."""
        return self.memo.once if self.memo is not None and self.memo.products else None

    @property
    def last(self) -> Callable[[Callable[[], Any]], Any] | None:
        """For down_proj: no gradient needs its output, so the recomputation returns zeros instead."""
        return self.memo.first if self.memo is not None and self.memo.unread else None

    def remember(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        return new

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, scale: float) -> Tensor:
        return packed_attention(q_THd, k_TGd, v_TGv, self.layout, scale, self.kept)


@dataclass
class PrefillPass(PackedPass):
    """A packed pass whose document s fills row s of an empty cache."""

    cache: Cache = field(kw_only=True)
    rows_T: Tensor = field(kw_only=True)
    positions_T: Tensor = field(kw_only=True)

    def remember(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        self.cache.write(layer, self.rows_T, self.positions_T, new)
        return new


@dataclass
class StepPass:
    """One new token per sequence: it is written to the cache and attends to everything its row holds."""

    cos_Tr: Tensor
    sin_Tr: Tensor
    cache: Cache
    rows_T: Tensor
    positions_T: Tensor

    def once(self, compute: Callable[[], Value]) -> Value:
        return compute()

    kept = products = last = None
    latent: ClassVar[LatentForm] = "absorbed"

    def __post_init__(self) -> None:
        self.longest = max(self.cache.lengths) + 1
        steps = torch.arange(self.longest, device=self.positions_T.device)
        even = min(self.cache.lengths) + 1 == self.longest
        self.mask_S11N = None if even else (steps[None] <= self.positions_T[:, None])[:, None, None, :]

    def remember(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """The new values -> everything remembered so far, [S, N, …]."""
        return tuple(t[:, : self.longest] for t in self.cache.write(layer, self.rows_T, self.positions_T, new))

    def attend(self, q_SHd: Tensor, k_SNGd: Tensor, v_SNGv: Tensor, scale: float) -> Tensor:
        """Query heads that share a key head become its queries: each key is read once for all of them, and
        not repeated."""
        groups = k_SNGd.shape[2]
        o_SGJv = F.scaled_dot_product_attention(
            q_SHd.unflatten(1, (groups, -1)),
            k_SNGd.transpose(1, 2),
            v_SNGv.transpose(1, 2),
            attn_mask=self.mask_S11N,
            scale=scale,
        )
        return o_SGJv.flatten(1, 2)


@dataclass
class StepWithin(StepPass):
    """A step over the first `width` positions of the cache. Its launches depend on no other number of the
    host.

    A mask made on the device hides the positions beyond a row's own; the cache has finite numbers there.
    """

    width: int = field(kw_only=True)

    def __post_init__(self) -> None:
        self.longest = self.width
        steps = torch.arange(self.width, device=self.positions_T.device)
        self.mask_S11N = (steps[None] <= self.positions_T[:, None])[:, None, None, :]


Pass = PackedPass | StepPass
