"""The three passes through a decoder: packed, prefill and step.

Packed is for training and scoring. Prefill is packed and also fills the cache. Step runs one new token per
sequence; it can also run at a fixed width.

Every layer receives the pass, which holds the rotary tables, the attention layout and the cache. A layer
never checks the kind of its pass.

T tokens, S sequences, N cached positions, H query heads, G key/value heads, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.core.batch import send
from unfreeze.kernels import compressed
from unfreeze.kernels.attention import CAUSAL, DocumentLayout, Mask
from unfreeze.kernels.packed_attention import packed_attention
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.recurrence import (
    Inputs,
    Rule,
    Segments,
    final_states,
    packed_recurrence,
    recurrence_step,
)
from unfreeze.kernels.short_conv import conv_step, packed_conv, tail_of
from unfreeze.kernels.sparse_attention import Index, attend_selected, index_scores, select
from unfreeze.models.blocks.boundary import ON_DEVICE, Boundary
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.residency import RESIDENT, Residency
from unfreeze.models.blocks.saved import Saved, Skip
from unfreeze.models.blocks.taps import LayerTaps

Value = TypeVar("Value")
Tables = tuple[Tensor, Tensor]
"""cos and sin, [T, R/2] float32, of each token."""
LatentForm = Literal["expanded", "absorbed"]
"""Form of latent attention (mla.py). expanded: keys and values of each token are expanded once, for many
queries. absorbed: one query per sequence attends to the latents themselves."""


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
    tokens_T   the tokens themselves, by which some routers choose
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
    tokens_T: Tensor | None = None
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

    @cached_property
    def segments(self) -> Segments:
        """Places of the tokens when a recurrence runs in chunks; built once for all layers."""
        return Segments.build(self.layout.starts, self.layout.num_tokens, self.cos_Tr.device)

    @cached_property
    def offsets_T(self) -> Tensor:
        """Place of each token in its document, int64."""
        starts_S = torch.tensor((*self.layout.starts, self.layout.num_tokens))
        lengths_S = starts_S.diff()
        host_T = torch.arange(self.layout.num_tokens) - starts_S[:-1].repeat_interleave(lengths_S)
        return send(host_T, self.cos_Tr.device)

    def convolve(
        self, name: str, x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None = None, *, silu: bool
    ) -> Tensor:
        """Causal convolution within each document (kernels/short_conv); `name` is that of its state."""
        return packed_conv(x_TC, weight_CK, bias_C, self.offsets_T, silu)

    def recur(self, name: str, inputs: Inputs, rule: Rule) -> Tensor:
        """Recurrence within each document (kernels/recurrence); `name` is that of its state."""
        return packed_recurrence(inputs, self.segments, rule, self.reuse_expensive)

    def entries(self, rate: int) -> compressed.Entries:
        """Places of the entries of windows of `rate` tokens; built once for all layers."""
        return self.layout.once(
            rate,
            lambda: compressed.Entries.build(
                self.layout.starts, self.layout.num_tokens, rate, self.cos_Tr.device
            ),
        )

    def pool(
        self, name: str, x_TC: Tensor, z_TC: Tensor, bias_mC: Tensor, rate: int, *, overlap: bool
    ) -> Tensor:
        """The entries of all documents, [E, d] (kernels/compressed); `name` is that of the state."""
        return compressed.pool(x_TC, z_TC, bias_mC, self.entries(rate), overlap=overlap)

    def tables_of_entries(self, name: str, rate: int) -> Tables:
        """Rotary tables `name` at the first token of each entry's window."""
        cos_Tr, sin_Tr = self.tables(name)
        first_E = self.entries(rate).first_E
        return cos_Tr[first_E], sin_Tr[first_E]

    def remember_entries(self, layer: int, rate: int, k_Td: Tensor, *entries: Tensor) -> tuple[Tensor, ...]:
        """As `remember`, for keys of tokens and of entries."""
        return k_Td, *entries

    def select_entries(self, index: Index, keys: int, rate: int) -> Tensor | None:
        """The best `keys` entries of every token, as attend_entries takes them; None if none has more."""
        if self.longest // rate <= keys:
            return None
        return compressed.select(index, self.entries(rate), keys)

    def attend_entries(
        self,
        q_THd: Tensor,
        k_Td: Tensor,
        e_Ed: Tensor,
        sinks_H: Tensor,
        scale: float,
        window: int,
        rate: int,
        chosen_TK: Tensor | None,
    ) -> Tensor:
        """Attention to the last tokens and the entries of the own document (kernels/compressed)."""
        if self.taps is not None:
            self.taps.put("q", q_THd)
        entries, reuse = self.entries(rate), self.reuse_expensive
        return compressed.attend(q_THd, k_Td, e_Ed, sinks_H, entries, scale, window, chosen_TK, reuse)

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

    @cached_property
    def rows_S(self) -> Tensor:
        """The row of each document."""
        return self.rows_T[send(torch.tensor(self.layout.starts), self.rows_T.device)]

    def convolve(
        self, name: str, x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None = None, *, silu: bool
    ) -> Tensor:
        tail_SKC = tail_of(x_TC, self.offsets_T, self.segments.last_S, weight_CK.shape[1])
        self.cache.write_state(name, self.rows_S, tail_SKC)
        return packed_conv(x_TC, weight_CK, bias_C, self.offsets_T, silu)

    def recur(self, name: str, inputs: Inputs, rule: Rule) -> Tensor:
        o_THv, state_SHkv = final_states(inputs, self.segments, rule)
        self.cache.write_state(name, self.rows_S, state_SHkv)
        return o_THv

    def pool(
        self, name: str, x_TC: Tensor, z_TC: Tensor, bias_mC: Tensor, rate: int, *, overlap: bool
    ) -> Tensor:
        both_T2C = torch.cat((x_TC, z_TC), dim=-1)
        covered = rate * (1 + overlap)
        tail_Sn2C = tail_of(both_T2C, self.offsets_T, self.segments.last_S, covered)
        self.cache.write_state(name, self.rows_S, tail_Sn2C)
        return super().pool(name, x_TC, z_TC, bias_mC, rate, overlap=overlap)

    def remember_entries(self, layer: int, rate: int, k_Td: Tensor, *entries: Tensor) -> tuple[Tensor, ...]:
        """An entry is kept at the last token of its window."""
        last_E, at_tokens = self.entries(rate).first_E + rate - 1, list[Tensor]()
        for e_Ed in entries:
            at_tokens.append(e_Ed.new_zeros(len(k_Td), e_Ed.shape[-1]))
            at_tokens[-1][last_E] = e_Ed
        self.cache.write(layer, self.rows_T, self.positions_T, (k_Td, *at_tokens))
        return k_Td, *entries

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
    tokens_T: Tensor | None = None

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

    def convolve(
        self, name: str, x_SC: Tensor, weight_CK: Tensor, bias_C: Tensor | None = None, *, silu: bool
    ) -> Tensor:
        """One token behind each row's window, which moves on."""
        window_SKC = self.cache.states[name][: len(x_SC)]
        y_SC, moved_SKC = conv_step(x_SC, window_SKC, weight_CK, bias_C, silu)
        window_SKC.copy_(moved_SKC)
        return y_SC

    def recur(self, name: str, inputs: Inputs, rule: Rule) -> Tensor:
        """One token behind each row's state, which moves on."""
        state_SHkv = self.cache.states[name][: len(inputs.q)]
        o_SHv, moved_SHkv = recurrence_step(inputs, state_SHkv, rule)
        state_SHkv.copy_(moved_SHkv)
        return o_SHv

    def pool(
        self, name: str, x_SC: Tensor, z_SC: Tensor, bias_mC: Tensor, rate: int, *, overlap: bool
    ) -> Tensor:
        """The entry [S, d] of each row's last tokens, which move on; it counts if they complete a window."""
        before_Sn2C = self.cache.states[name][: len(x_SC)]
        both_Sn2C = torch.cat((before_Sn2C, torch.cat((x_SC, z_SC), dim=-1)[:, None]), dim=1)
        x_SnC, z_SnC = both_Sn2C.chunk(2, dim=-1)
        first_S = self.positions_T < rate
        e_Sd = compressed.pool_step(x_SnC, z_SnC, bias_mC, first_S, rate=rate, overlap=overlap)
        before_Sn2C.copy_(both_Sn2C[:, 1:])
        return e_Sd

    def tables_of_entries(self, name: str, rate: int) -> Tables:
        """Those of a token's window: tables that only change with it (models/blocks/rope.py: Stepped)."""
        return self.tables(f"{name} every {rate}")

    def remember_entries(self, layer: int, rate: int, k_Sd: Tensor, *entries: Tensor) -> tuple[Tensor, ...]:
        """-> keys of all cached tokens [S, N, d], and of all complete windows [S, N // m, d]."""
        k_SNd, *at_tokens = self.remember(layer, k_Sd, *entries)
        return k_SNd, *(e_SNd[:, rate - 1 :: rate] for e_SNd in at_tokens)

    def _complete(self, count: int, rate: int) -> Tensor:
        """bool [S, E]: the windows complete at each row's new token, of `count` cached entries."""
        places_E = torch.arange(count, device=self.positions_T.device)
        return places_E < ((self.positions_T + 1) // rate)[:, None]

    def select_entries(self, index: Index, keys: int, rate: int) -> Tensor | None:
        """bool [S, E]: the best `keys` entries of each row; None if none has more."""
        count = index.k_Ti.shape[1]
        if count <= keys:
            return None
        scores_SE = index_scores(index.q_TJi[:, None], index.w_TJ[:, None], index.k_Ti, index.scale)[:, 0]
        scores_SE = scores_SE.masked_fill(~self._complete(count, rate), -torch.inf)
        best_SK = scores_SE.topk(keys, dim=-1, sorted=False).indices
        return torch.zeros_like(scores_SE, dtype=torch.bool).scatter_(1, best_SK, True)

    def attend_entries(
        self,
        q_SHd: Tensor,
        k_SNd: Tensor,
        e_SEd: Tensor,
        sinks_H: Tensor,
        scale: float,
        window: int,
        rate: int,
        chosen_SE: Tensor | None,
    ) -> Tensor:
        """As in PackedPass, for the new tokens."""
        complete_SE = self._complete(e_SEd.shape[1], rate)
        if chosen_SE is not None:
            complete_SE &= chosen_SE
        seen_SN = torch.cat((self.allowed(Mask(window))[:, 0, 0], complete_SE), dim=1)
        return compressed.attend_one(q_SHd, torch.cat((k_SNd, e_SEd), dim=1), seen_SN, sinks_H, scale)

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
