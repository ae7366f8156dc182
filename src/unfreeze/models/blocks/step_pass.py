"""The pass of a step of generation: one new token per sequence; it can also run at a fixed width.

The other passes, and what they share: passes.py. S sequences, N cached positions, H query heads, G key/value
heads, K experts per token; E entries of compressed attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels import compressed, moba
from unfreeze.kernels.attention import CAUSAL, Mask
from unfreeze.kernels.recurrence import Inputs, Rule, recurrence_step
from unfreeze.kernels.short_conv import conv_step
from unfreeze.kernels.sparse_attention import Index, index_scores
from unfreeze.models.blocks.cache import Cache

Value = TypeVar("Value")
Tables = tuple[Tensor, Tensor]
"""cos and sin, [T, R/2] float32, of each token."""
LatentForm = Literal["expanded", "absorbed"]
"""Form of latent attention (mla.py). expanded: keys and values of each token are expanded once, for many
queries. absorbed: one query per sequence attends to the latents themselves."""


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
    shorter: dict[int, ShortStep] = field(default_factory=dict[int, "ShortStep"])

    def reuse(self, compute: Callable[[], Value]) -> Value:
        return compute()

    def unrotated(self, q_THd: Tensor, k_TGd: Tensor, width: int | None = None) -> None:
        """As in PackedPass; a step has no taps."""

    reuse_expensive = reuse_linear = skip_unread = taps = noise = None
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
        window_SKC = self.cache.state(name, len(x_SC))
        y_SC, moved_SKC = conv_step(x_SC, window_SKC, weight_CK, bias_C, silu)
        self.cache.move_state(name, moved_SKC)
        return y_SC

    def recur(self, name: str, inputs: Inputs, rule: Rule) -> Tensor:
        """One token behind each row's state, which moves on."""
        state_SHkv = self.cache.state(name, len(inputs.q))
        o_SHv, moved_SHkv = recurrence_step(inputs, state_SHkv, rule)
        self.cache.move_state(name, moved_SHkv)
        return o_SHv

    def shorten(
        self, name: str, x_SD: Tensor, by: int, layer: Callable[[Tensor, ShortStep], Tensor]
    ) -> Tensor:
        """As in PackedPass. The layer runs for the rows whose new token completes a group, if there are any.

        A row's state is the sum of its open group and the layer's last change, [S, 2, D].
        """
        state_S2D = self.cache.state(name, len(x_SD))
        open_SD, change_SD = state_S2D.unbind(1)
        open_SD += x_SD
        rows = [row for row, length in enumerate(self.cache.lengths) if (length + 1) % by == 0]
        if rows:
            p_sD = (open_SD[rows] / by).to(x_SD.dtype)
            change_SD[rows] = (layer(p_sD, self._shortened(by, rows)) - p_sD).to(change_SD.dtype)
            open_SD[rows] = 0
        return x_SD + change_SD.to(x_SD.dtype)

    def _shortened(self, by: int, rows: list[int]) -> ShortStep:
        """The step of these rows in a shortened layer; the same for all such layers."""
        if by not in self.shorter:
            every = len(rows) == len(self.cache.lengths)
            self.shorter[by] = ShortStep(
                self.cos_Tr[rows],
                self.sin_Tr[rows],
                self.cache.shortened(by, None if every else rows),
                self.rows_T[rows],
                self.positions_T[rows] // by,
                {name: (cos[rows], sin[rows]) for name, (cos, sin) in self.named.items()},
                tokens_T=None if self.tokens_T is None else self.tokens_T[rows],
                whole=self.cache,
                places_T=self.positions_T[rows],
            )
        return self.shorter[by]

    def pool(
        self, name: str, x_SC: Tensor, z_SC: Tensor, bias_mC: Tensor, rate: int, *, overlap: bool
    ) -> Tensor:
        """The entry [S, d] of each row's last tokens, which move on; it counts if they complete a window."""
        before_Sn2C = self.cache.state(name, len(x_SC))
        both_Sn2C = torch.cat((before_Sn2C, torch.cat((x_SC, z_SC), dim=-1)[:, None]), dim=1)
        x_SnC, z_SnC = both_Sn2C.chunk(2, dim=-1)
        first_S = self.positions_T < rate
        e_Sd = compressed.pool_step(x_SnC, z_SnC, bias_mC, first_S, rate=rate, overlap=overlap)
        self.cache.move_state(name, both_Sn2C[:, 1:])
        return e_Sd

    def tables_of_entries(self, name: str, rate: int) -> Tables:
        """Rotary tables at the first position of each token's window (models/blocks/rope.py: Stepped)."""
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

    def summarise(self, layer: int, size: int, k_SNGd: Tensor, summary: Callable[[Tensor], Tensor]) -> Tensor:
        """-> [S, N // size, G, r], of all complete blocks of the rows.

        A row's present block is summarised again at each step, from `size` cached keys; nobody reads it
        before its last token. So a step has no state but the cache, and no launch depends on a position.
        """
        blocks_S = self.positions_T // size
        seen = min(size, k_SNGd.shape[1])  # of a block that no row can fill yet
        place_SB = (blocks_S * size)[:, None] + torch.arange(seen, device=blocks_S.device)
        rows_S1 = torch.arange(len(blocks_S), device=blocks_S.device)[:, None]
        k_SBGd = k_SNGd[rows_S1, place_SB.clamp(max=k_SNGd.shape[1] - 1)]
        self.cache.write_summaries(layer, self.rows_T, blocks_S, size, summary(k_SBGd))
        return self.cache.read_summaries(layer, len(blocks_S), self.longest // size, size)

    def select_blocks(self, gated: moba.Gated, size: int, chosen: int) -> Tensor:
        """As in PackedPass."""
        return moba.select_one(gated, self.positions_T // size, chosen)

    def attend_blocks(
        self, q_SHd: Tensor, k_SNGd: Tensor, v_SNGv: Tensor, scale: float, size: int, chosen_SHC: Tensor
    ) -> Tensor:
        """As in PackedPass; keys and values of other blocks are not read."""
        return moba.attend_one(q_SHd, k_SNGd, v_SNGv, self.positions_T, scale, size, chosen_SHC)

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


@dataclass
class ShortStep(StepPass):
    """A step of a layer that has one position per several tokens. Its rotary tables are those of the tokens.

    whole     the cache with a position per token; places_T: there, those of the new tokens
    """

    whole: Cache = field(kw_only=True)
    places_T: Tensor = field(kw_only=True)

    def chose(self, layer: int, ids_SK: Tensor) -> None:
        self.whole.write_route(layer, self.rows_T, self.places_T, ids_SK)
