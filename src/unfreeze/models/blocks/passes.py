"""The passes through a decoder over whole documents: packed, for training and scoring, and prefill.

Prefill is packed and also fills the cache. The pass of a step is in step_pass.py.

Every layer receives the pass, which holds the rotary tables, the attention layout and the cache. A layer
never checks the kind of its pass.

T tokens, S sequences, N cached positions, H query heads, G key/value heads, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from unfreeze.core.batch import send
from unfreeze.core.errors import ConfigError
from unfreeze.kernels import compressed, moba, token_pool
from unfreeze.kernels.attention import CAUSAL, DocumentLayout, Mask
from unfreeze.kernels.attention.largest import largest_scores
from unfreeze.kernels.packed_attention import packed_attention
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.recurrence import Inputs, Rule, Segments, final_states, packed_recurrence
from unfreeze.kernels.short_conv import packed_conv, tail_of
from unfreeze.kernels.sparse_attention import Index, attend_selected, select
from unfreeze.models.blocks.boundary import ON_DEVICE, Boundary
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.noise import Noise
from unfreeze.models.blocks.residency import RESIDENT, Residency
from unfreeze.models.blocks.saved import Saved, Skip
from unfreeze.models.blocks.step_pass import LatentForm, StepPass, Tables, Value
from unfreeze.models.blocks.taps import LayerTaps


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
    noise      perturbs the scores by which experts are chosen, in training; None: the best are chosen
    shorter    number of tokens -> the pass of layers that see so many as one
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
    noise: Noise | None = None
    shorter: dict[int, PackedPass] = field(default_factory=dict[int, "PackedPass"])
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

    def shorten(
        self, name: str, x_TD: Tensor, by: int, layer: Callable[[Tensor, PackedPass], Tensor]
    ) -> Tensor:
        """x + carry(layer(p) - p), p = pool(x) the means of every `by` tokens (kernels/token_pool).

        The layer gets a pass over the shortened documents; a group has the rotary position of its last token.
        `name` is that of the state.
        """
        return x_TD + token_pool.carry(self._change(x_TD, by, layer), self.groups(by))

    def _change(self, x_TD: Tensor, by: int, layer: Callable[[Tensor, PackedPass], Tensor]) -> Tensor:
        """layer(p) - p, [E, D]."""
        if self.taps is not None:
            raise ConfigError(
                f"this objective reads {', '.join(self.taps.names)} of a shortened layer, which has no row"
                " per token",
                next="choose another objective, or layers that are not shortened",
            )
        p_ED = token_pool.pool(x_TD, self.groups(by))
        if by not in self.shorter:
            self.shorter[by] = self._shortened(self.groups(by), by)
        inner = self.shorter[by]
        with inner.visiting(self.saved) if self.saved is not None else nullcontext():
            return layer(p_ED, inner) - p_ED

    def groups(self, by: int) -> token_pool.Groups:
        """Groups of `by` tokens; built once for all layers."""
        return self.layout.once(
            ("groups", by),
            lambda: token_pool.Groups.build(
                self.layout.starts, self.layout.num_tokens, by, self.cos_Tr.device
            ),
        )

    def _shortened(self, groups: token_pool.Groups, by: int) -> PackedPass:
        """The pass over the groups of all documents; the same for all layers of this `by`."""
        return PackedPass(*self._at_groups(groups), **self._of_groups(groups))

    def _at_groups(self, groups: token_pool.Groups) -> tuple[Tensor, Tensor, DocumentLayout]:
        """Rotary tables at the last token of each group, and the layout of the groups."""
        layout = DocumentLayout.build(groups.starts, groups.count, self.cos_Tr.device)
        return self.cos_Tr[groups.last_E], self.sin_Tr[groups.last_E], layout

    def _of_groups(self, groups: token_pool.Groups) -> dict[str, Any]:
        """The other fields of the pass over groups; given experts are those of its last token."""
        last_E, known_E1 = groups.last_E, groups.complete_E[:, None]
        return {
            "named": {name: (cos[last_E], sin[last_E]) for name, (cos, sin) in self.named.items()},
            "residency": self.residency,
            "boundary": self.boundary,
            "routes": {
                layer: ids_TK[last_E].masked_fill(~known_E1, -1) for layer, ids_TK in self.routes.items()
            },
            "tokens_T": None if self.tokens_T is None else self.tokens_T[last_E],
            "noise": None if self.noise is None else self.noise.at(groups.host_E),
        }

    def summarise(self, layer: int, size: int, k_TGd: Tensor, summary: Callable[[Tensor], Tensor]) -> Tensor:
        """summary(keys [E, B, G, d]) -> [E, G, r] of all complete blocks of `size` tokens."""
        first_E = self.entries(size).first_E
        size = min(size, len(k_TGd))  # a greater block has no entry
        return summary(k_TGd[first_E[:, None] + torch.arange(size, device=first_E.device)])

    def select_blocks(self, gated: moba.Gated, size: int, chosen: int) -> Tensor:
        """The earlier blocks that each query sees (kernels/moba)."""
        return moba.select(gated, self.entries(size), chosen)

    def attend_blocks(
        self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, scale: float, size: int, chosen_THC: Tensor
    ) -> Tensor:
        """Attention of every token to its own block and the chosen ones of its document."""
        self._tap_attention(q_THd, k_TGd, v_TGv, scale, CAUSAL)
        return moba.attend(q_THd, k_TGd, v_TGv, self.layout, scale, size, chosen_THC, self.reuse_expensive)

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
        self._tap_attention(q_THd, k_TGd, v_TGv, scale, mask)
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

    def _tap_attention(self, q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, scale: float, mask: Mask) -> None:
        if self.taps is not None:
            self.taps.put("q", q_THd)
            self.taps.put("k", k_TGd)
            self.taps.put("v", v_TGv)
            self._tap_logit(q_THd, k_TGd, scale, mask)

    def _tap_logit(self, q_THd: Tensor, k_TGd: Tensor, scale: float, mask: Mask) -> None:
        """Tap the largest scores if requested. A recomputation puts nothing there: no gradient needs them."""
        if self.taps is not None and "logit" in self.taps.names:
            second = self.saved is not None and self.saved.second
            largest = q_THd.new_empty(0) if second else largest_scores(q_THd, k_TGd, self.layout, scale, mask)
            self.taps.put("logit", largest)

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

    def leave(self, name: str, state_S: Tensor) -> None:
        """Store a state behind the last token of each document."""
        self.cache.write_state(name, self.rows_S, state_S)

    def shorten(
        self, name: str, x_TD: Tensor, by: int, layer: Callable[[Tensor, PackedPass], Tensor]
    ) -> Tensor:
        """It leaves the sum of the open group and the layer's last change, [S, 2, D], in float32 at least."""
        change_ED, groups = self._change(x_TD, by, layer), self.groups(by)
        open_SD = token_pool.open_sums(x_TD, groups)
        last_SD = change_ED[groups.final_S].masked_fill(~groups.complete_S[:, None], 0)
        self.leave(name, torch.stack((open_SD, last_SD.to(open_SD.dtype)), dim=1))
        return x_TD + token_pool.carry(change_ED, groups)

    def _shortened(self, groups: token_pool.Groups, by: int) -> PackedPass:
        return ShortPrefill(
            *self._at_groups(groups),
            **self._of_groups(groups),
            cache=self.cache.shortened(by),
            rows_T=self.rows_T[groups.last_E],
            positions_T=groups.index_E,
            groups_E=groups,
            whole=self.cache,
            places_T=self.positions_T[groups.last_E],
        )

    def convolve(
        self, name: str, x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None = None, *, silu: bool
    ) -> Tensor:
        tail_SKC = tail_of(x_TC, self.offsets_T, self.segments.last_S, weight_CK.shape[1])
        self.leave(name, tail_SKC)
        return packed_conv(x_TC, weight_CK, bias_C, self.offsets_T, silu)

    def recur(self, name: str, inputs: Inputs, rule: Rule) -> Tensor:
        o_THv, state_SHkv = final_states(inputs, self.segments, rule)
        self.leave(name, state_SHkv)
        return o_THv

    def pool(
        self, name: str, x_TC: Tensor, z_TC: Tensor, bias_mC: Tensor, rate: int, *, overlap: bool
    ) -> Tensor:
        both_T2C = torch.cat((x_TC, z_TC), dim=-1)
        covered = rate * (1 + overlap)
        tail_Sn2C = tail_of(both_T2C, self.offsets_T, self.segments.last_S, covered)
        self.leave(name, tail_Sn2C)
        return super().pool(name, x_TC, z_TC, bias_mC, rate, overlap=overlap)

    def remember_entries(self, layer: int, rate: int, k_Td: Tensor, *entries: Tensor) -> tuple[Tensor, ...]:
        """An entry is kept at the last token of its window."""
        last_E, at_tokens = self.entries(rate).first_E + rate - 1, list[Tensor]()
        for e_Ed in entries:
            at_tokens.append(e_Ed.new_zeros(len(k_Td), e_Ed.shape[-1]))
            at_tokens[-1][last_E] = e_Ed
        self.cache.write(layer, self.rows_T, self.positions_T, (k_Td, *at_tokens))
        return k_Td, *entries

    def summarise(self, layer: int, size: int, k_TGd: Tensor, summary: Callable[[Tensor], Tensor]) -> Tensor:
        e_EGr, first_E = super().summarise(layer, size, k_TGd, summary), self.entries(size).first_E
        blocks_E = self.positions_T[first_E] // size
        self.cache.write_summaries(layer, self.rows_T[first_E], blocks_E, size, e_EGr)
        return e_EGr

    def chose(self, layer: int, ids_TK: Tensor) -> None:
        self.cache.write_route(layer, self.rows_T, self.positions_T, ids_TK)


@dataclass
class ShortPrefill(PrefillPass):
    """Prefill of a layer that has one position per several tokens, in a cache of that size.

    A document shorter than a group leaves nothing: its states are 0, its keys are overwritten by the first.
    whole     the cache with a position per token; places_T: there, that of each group's last token
    """

    groups_E: token_pool.Groups = field(kw_only=True)
    whole: Cache = field(kw_only=True)
    places_T: Tensor = field(kw_only=True)

    def leave(self, name: str, state_S: Tensor) -> None:
        complete_S = self.groups_E.complete_S.view(-1, *[1] * (state_S.dim() - 1))
        super().leave(name, state_S.masked_fill(~complete_S, 0))

    def chose(self, layer: int, ids_TK: Tensor) -> None:
        complete_E = self.groups_E.complete_E
        self.whole.write_route(layer, self.rows_T[complete_E], self.places_T[complete_E], ids_TK[complete_E])


Pass = PackedPass | StepPass
