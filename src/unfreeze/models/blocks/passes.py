"""The three passes through a decoder: packed, prefill and step.

Packed is for training and scoring. Prefill is packed and also fills the cache. Step runs one new token per
sequence; it can also run at a fixed width.

Every layer receives the pass, which holds the rotary tables, the attention layout and the cache. A layer
never checks the kind of its pass.

T tokens, S sequences, N cached positions, H query heads, G key/value heads, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.core.errors import UserError
from unfreeze.kernels.attention import CAUSAL, DocumentLayout, Mask
from unfreeze.kernels.packed_attention import packed_attention
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.sparse_attention import Index, attend_selected, index_scores, select
from unfreeze.models.blocks.boundary import ON_DEVICE, Boundary
from unfreeze.models.blocks.residency import RESIDENT, Residency
from unfreeze.models.blocks.saved import Saved, Skip
from unfreeze.models.blocks.taps import LayerTaps

Value = TypeVar("Value")
Tables = tuple[Tensor, Tensor]
"""cos and sin, [T, R/2] float32, of each token."""
LatentForm = Literal["expanded", "absorbed"]
"""Form of latent attention (mla.py). expanded: keys and values of each token are expanded once, for many
queries. absorbed: one query per sequence attends to the latents themselves."""


class Cache:
    """The KV cache of at most R sequences (`rows`): per layer a few tensors [R, capacity, …].

    They are keys and values, or MLA's latent with its rotary key. The first S = len(lengths) rows are
    running; `lengths` (on the host) counts the filled positions of each. Rows are independent: `more` adds
    some, `fork` gives the positions of one to others, `keep` drops some.

    The tensors keep their addresses while rows come and go. `version` counts their allocations: a recording
    of a step holds as long as it does not change.
    `routes`: the experts that each MoE layer chose, int16 [R, capacity, K] per layer; None if not asked for.
    """

    def __init__(self, num_sequences: int, capacity: int, *, routes: bool = False):
        self.lengths = [0] * num_sequences
        self.rows, self.capacity = num_sequences, capacity
        self.longest = capacity  # of a prompt
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        self.routes: dict[int, Tensor] | None = {} if routes else None
        self.version = 0

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores())

    @property
    def positions(self) -> int:
        """Most positions of a row."""
        return self.capacity

    def _stores(self) -> list[Tensor]:
        every = [store for tensors in self.layers.values() for store in tensors]
        return every + list((self.routes or {}).values())

    def write(self, layer: int, rows_T: Tensor, positions_T: Tensor, new: tuple[Tensor, ...]) -> None:
        """Store one value per token at (row, position); the layer's tensors are allocated on first use."""
        if layer not in self.layers:
            self.layers[layer] = tuple(self._empty(value) for value in new)
        for store, value in zip(self.layers[layer], new, strict=True):
            store[rows_T, positions_T] = value

    def write_route(self, layer: int, rows_T: Tensor, positions_T: Tensor, ids_TK: Tensor) -> None:
        """Store the experts that were chosen for each token, if `routes` are asked for."""
        if self.routes is not None:
            new = ids_TK.to(torch.int16)
            if layer not in self.routes:
                self.routes[layer] = self._empty(new)
            self.routes[layer][rows_T, positions_T] = new

    def route(self, row: int) -> Tensor:
        """Return the experts chosen at the filled positions of a row, int16 [positions, MoE layers, K].

        On the host. Empty [positions, 0, 0] without MoE layers.
        """
        stores = [store for _, store in sorted((self.routes or {}).items())]
        length = self.lengths[row]
        if not stores:
            return torch.empty(length, 0, 0, dtype=torch.int16)
        return torch.stack([store[row, :length] for store in stores], 1).cpu()

    def _empty(self, value: Tensor) -> Tensor:
        self.version += 1
        return value.new_zeros(self.rows, self.capacity, *value.shape[1:])

    def read(self, layer: int, rows: int, longest: int) -> tuple[Tensor, ...]:
        """Return the first `longest` positions of the first rows, [rows, longest, …]."""
        return tuple(store[:rows, :longest] for store in self.layers[layer])

    def own(self, row: int) -> int:
        """Return the number of positions that a row holds itself."""
        return self.lengths[row]

    def room_for_prompts(self) -> int:
        """Return the number of further prompts that can be filled, if there are rows for them."""
        return self.rows

    def release(self, rows: Sequence[int]) -> None:
        """Forget the prompts of running rows that will be dropped or filled anew."""

    def begin(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Prepare these running rows to be filled with prompts of these lengths."""

    def more(self, count: int) -> None:
        """Add empty rows behind the running ones. Raises UserError if there are fewer."""
        if len(self.lengths) + count > self.rows:
            raise UserError(
                f"the cache has {self.rows} rows, {len(self.lengths)} of them run: no {count} more"
            )
        self.lengths = self.lengths + [0] * count

    def fork(self, source: int, rows: Sequence[int], length: int) -> None:
        """Give the first `length` positions of row `source` to other running rows, in place of theirs.

        They are copied. `source` itself may be among the rows; it then forgets what came after.
        """
        others = [row for row in rows if row != source]
        if others:
            for store in self._stores():
                store[others, :length] = store[source, :length]
        for row in rows:
            self.lengths[row] = length

    def require_room(self) -> None:
        """Raise UserError if a row has no position left."""
        if max(self.lengths) >= self.capacity:
            raise UserError(
                f"the cache holds {self.capacity} positions and all are filled; create it with a larger"
                " capacity"
            )

    def keep(self, rows: list[int]) -> list[int]:
        """Keep only these rows: finished sequences leave the batch.

        Returns for each remaining row the index it had before. The last rows move into the freed places and
        nothing else is copied: at most one row per finished sequence. The freed memory is for `more` rows.
        """
        stays, moves = (
            {row for row in rows if row < len(rows)},
            sorted(row for row in rows if row >= len(rows)),
        )
        order = [row if row in stays else moves.pop() for row in range(len(rows))]
        for place, row in enumerate(order):
            if place != row:
                for store in self._stores():
                    store[place, : self.own(row)] = store[row, : self.own(row)]
        self.lengths = [self.lengths[row] for row in order]
        return order


@dataclass
class PackedPass:
    """Every document attends to itself only; nothing is cached.

    saved      results of the layer being visited: forward stores in it what the recomputation in backward
               reuses. None: nothing is recomputed
    chunks     the same pass cut into whole documents: (tokens, pass over them)
    named      further rotary tables, if layers differ: name -> (cos, sin)
    residency  is notified before each layer is computed
    boundary   keeps the input of a recomputed layer
    taps       collects the tensors that an objective requests from the layer being visited; None: none
    routes     experts given to the tokens, per MoE layer: int [T, K], negative where the layer chooses itself
    chosen     the keys that layers chose for their tokens and that later layers use too (blocks/sparse.py)
    """

    cos_Tr: Tensor
    sin_Tr: Tensor
    layout: DocumentLayout
    saved: Saved | None = None
    chunks: tuple[tuple[slice, PackedPass], ...] = ()
    named: Mapping[str, Tables] = field(default_factory=dict)
    residency: Residency = RESIDENT
    boundary: Boundary = ON_DEVICE
    taps: LayerTaps | None = None
    routes: Mapping[int, Tensor] = field(default_factory=dict[int, Tensor])
    chosen: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    latent: ClassVar[LatentForm] = "expanded"
    caches: ClassVar[bool] = False
    """True if `remember` stores what it gets."""

    @property
    def longest(self) -> int:
        """Most tokens that a token may see, itself included."""
        return self.layout.longest

    @contextmanager
    def visiting(self, saved: Saved, taps: LayerTaps | None = None) -> Iterator[None]:
        """Within this context, the layer saves to `saved` and reuses from it; `taps` collects."""
        before, self.saved, self.taps = (self.saved, self.taps), saved, taps
        try:
            yield
        finally:
            self.saved, self.taps = before

    def reuse(self, compute: Callable[[], Value]) -> Value:
        """Return compute(); when the layer is recomputed, return the first result instead.

        For results that must not differ (the chosen experts) and for counters.
        """
        return compute() if self.saved is None else self.saved.reuse(compute)

    @property
    def reuse_expensive(self) -> Reuse | None:
        """`reuse` for outputs of attention and experts if those are saved, else None."""
        return self.saved.reuse if self.saved is not None and self.saved.expensive else None

    @property
    def reuse_linear(self) -> Reuse | None:
        """`reuse` for outputs of linear layers if those are saved, else None."""
        return self.saved.reuse if self.saved is not None and self.saved.linear else None

    @property
    def skip_unread(self) -> Skip | None:
        """For down_proj: no gradient needs its output, so the recomputation returns zeros instead."""
        return self.saved.skip if self.saved is not None and self.saved.unread else None

    def tables(self, name: str = "") -> Tables:
        """Rotary tables of that name (`Shape.ropes`); "": the model's own."""
        return self.named[name] if name else (self.cos_Tr, self.sin_Tr)

    def remember(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        return new

    def chose(self, layer: int, ids_TK: Tensor) -> None:
        """Notice the experts that an MoE layer chose; generation may want them."""

    def route(self, layer: int) -> Tensor | None:
        """The experts given to the tokens of an MoE layer, [T, K]; None: it chooses all itself."""
        return self.routes.get(layer)

    def unrotated(self, q_THd: Tensor, k_TGd: Tensor, width: int | None = None) -> None:
        """Tap queries and keys before rotation if an objective requests them: the first `width` of a head."""
        if self.taps is not None:
            self.taps.put("q_plain", q_THd[..., :width])
            self.taps.put("k_plain", k_TGd[..., :width])

    def attend(
        self,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGv: Tensor,
        scale: float,
        *,
        mask: Mask = CAUSAL,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention of every token to its own document; arguments as in packed_attention."""
        if self.taps is not None:
            self.taps.put("q", q_THd)
            self.taps.put("k", k_TGd)
            self.taps.put("v", v_TGv)
        return packed_attention(
            q_THd,
            k_TGd,
            v_TGv,
            self.layout,
            scale,
            mask=mask,
            softcap=softcap,
            sinks_H=sinks_H,
            reuse=self.reuse_expensive,
        )

    def select(self, index: Index, keys: int) -> Tensor:
        """The best `keys` keys of every token, as attend_selected takes them."""
        return select(index, self.layout, keys)

    def attend_selected(
        self, q_THd: Tensor, k_THd: Tensor, v_THv: Tensor, scale: float, chosen_TK: Tensor
    ) -> Tensor:
        """Attention of every token to the chosen keys of its own document."""
        if self.taps is not None:
            self.taps.put("q", q_THd)
            self.taps.put("k", k_THd)
            self.taps.put("v", v_THv)
        return attend_selected(q_THd, k_THd, v_THv, self.layout, scale, chosen_TK, reuse=self.reuse_expensive)


@dataclass
class PrefillPass(PackedPass):
    """A packed pass that fills rows of a cache: a row for each document."""

    cache: Cache = field(kw_only=True)
    rows_T: Tensor = field(kw_only=True)
    positions_T: Tensor = field(kw_only=True)
    caches: ClassVar[bool] = True

    def remember(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        self.cache.write(layer, self.rows_T, self.positions_T, new)
        return new

    def chose(self, layer: int, ids_TK: Tensor) -> None:
        self.cache.write_route(layer, self.rows_T, self.positions_T, ids_TK)


@dataclass
class StepPass:
    """One new token per sequence: it is written to the cache and attends to everything its row holds."""

    cos_Tr: Tensor
    sin_Tr: Tensor
    cache: Cache
    rows_T: Tensor
    positions_T: Tensor
    named: Mapping[str, Tables] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def reuse(self, compute: Callable[[], Value]) -> Value:
        return compute()

    def unrotated(self, q_THd: Tensor, k_TGd: Tensor, width: int | None = None) -> None:
        """As in PackedPass; a step has no taps."""

    reuse_expensive = reuse_linear = skip_unread = taps = None
    latent: ClassVar[LatentForm] = "absorbed"
    caches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.longest = max(self.cache.lengths) + 1
        even = min(self.cache.lengths) + 1 == self.longest
        self.mask_S11N = None if even else self.allowed(CAUSAL)
        self.masks: dict[Mask, Tensor | None] = {}

    def tables(self, name: str = "") -> Tables:
        """As in PackedPass."""
        return self.named[name] if name else (self.cos_Tr, self.sin_Tr)

    def allowed(self, mask: Mask) -> Tensor:
        """Mask of the N cached positions that each row's new token sees, bool [S, 1, 1, N]."""
        steps = torch.arange(self.longest, device=self.positions_T.device)
        return mask.allowed(self.positions_T[:, None], steps[None])[:, None, None, :]

    def mask_of(self, mask: Mask) -> Tensor | None:
        """`allowed`, computed once for all layers; None if every row sees all N."""
        if not mask.narrows(self.longest):
            return self.mask_S11N
        if mask not in self.masks:
            self.masks[mask] = self.allowed(mask)
        return self.masks[mask]

    def remember(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Cache the new values and return everything cached so far, [S, N, …]."""
        self.cache.write(layer, self.rows_T, self.positions_T, new)
        return self.cache.read(layer, len(self.rows_T), self.longest)

    def route(self, layer: int) -> Tensor | None:
        """A step chooses itself."""

    def chose(self, layer: int, ids_SK: Tensor) -> None:
        """As in PrefillPass."""
        self.cache.write_route(layer, self.rows_T, self.positions_T, ids_SK)

    def attend(
        self,
        q_SHd: Tensor,
        k_SNGd: Tensor,
        v_SNGv: Tensor,
        scale: float,
        *,
        mask: Mask = CAUSAL,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Query heads that share a key head become that head's queries, so no key is repeated."""
        groups = k_SNGd.shape[2]
        q_SGJd = q_SHd.unflatten(1, (groups, -1))
        k_SGNd, v_SGNv = k_SNGd.transpose(1, 2), v_SNGv.transpose(1, 2)
        seen_S11N = self.mask_of(mask)
        if softcap is not None or sinks_H is not None:
            return _one_query(q_SGJd, k_SGNd, v_SGNv, scale, seen_S11N, softcap, sinks_H).flatten(1, 2)
        o_SGJv = F.scaled_dot_product_attention(q_SGJd, k_SGNd, v_SGNv, attn_mask=seen_S11N, scale=scale)
        return o_SGJv.flatten(1, 2)

    def select(self, index: Index, keys: int) -> Tensor:
        """The cached positions of the best `keys` keys, [S, K]; a row that has fewer has its last repeated.

        index: of the new tokens; its keys are all cached ones, [S, N, i].
        """
        scores_SN = index_scores(index.q_TJi[:, None], index.w_TJ[:, None], index.k_Ti, index.scale)[:, 0]
        scores_SN = scores_SN.masked_fill(~self.allowed(CAUSAL)[:, 0, 0], -torch.inf)
        return scores_SN.topk(keys, dim=-1, sorted=False).indices.minimum(self.positions_T[:, None])

    def attend_selected(
        self, q_SHd: Tensor, k_SNGd: Tensor, v_SNGv: Tensor, scale: float, chosen_SK: Tensor
    ) -> Tensor:
        """Attention of the new tokens to the chosen positions of their rows."""
        seen_SN = torch.zeros(k_SNGd.shape[:2], dtype=torch.bool, device=k_SNGd.device)
        seen_S11N = seen_SN.scatter_(1, chosen_SK, True)[:, None, None]
        q_SGJd = q_SHd.unflatten(1, (k_SNGd.shape[2], -1))
        k_SGNd, v_SGNv = k_SNGd.transpose(1, 2), v_SNGv.transpose(1, 2)
        o_SGJv = F.scaled_dot_product_attention(q_SGJd, k_SGNd, v_SGNv, attn_mask=seen_S11N, scale=scale)
        return o_SGJv.flatten(1, 2)


def _one_query(
    q_SGJd: Tensor,
    k_SGNd: Tensor,
    v_SGNv: Tensor,
    scale: float,
    seen_S11N: Tensor | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Softcapped or sink attention, one query per head (formulas: kernels/attention/by_blocks.py)."""
    score_SGJN = (q_SGJd.float() @ k_SGNd.float().mT) * scale
    if softcap is not None:
        score_SGJN = softcap * torch.tanh(score_SGJN / softcap)
    if seen_S11N is not None:
        score_SGJN = score_SGJN.masked_fill(~seen_S11N, -torch.inf)
    if sinks_H is not None:
        sink = sinks_H.float().view(q_SGJd.shape[1], -1, 1).expand(len(q_SGJd), -1, -1, 1)
        score_SGJN = torch.cat((score_SGJN, sink), dim=-1)
    share_SGJN = score_SGJN.softmax(-1)[..., : k_SGNd.shape[2]]
    return (share_SGJN @ v_SGNv.float()).to(q_SGJd.dtype)


@dataclass
class StepWithin(StepPass):
    """A step over the first `width` positions of the cache.

    Its kernel launches depend on no host value but `width`. A mask computed on the device hides the positions
    beyond a row's own; the cache holds finite numbers there.
    """

    width: int = field(kw_only=True)

    def __post_init__(self) -> None:
        self.longest = self.width
        self.mask_S11N = self.allowed(CAUSAL)
        self.masks = {}


Pass = PackedPass | StepPass
