"""The pass of documents whose first positions are in the cache already: prefill from a position above 0.

Attention sees the cached positions and the new ones. Layers with a state, shortened layers and those that
choose among blocks or keys have none such: `CannotExtend`, and the document is read from its beginning.

T new tokens, M of a document, N positions of all documents, n of one; H query heads, G key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.attention import CAUSAL, Mask
from unfreeze.models.blocks.passes import PrefillPass

SCORES = 1 << 22
"""Scores of a block of queries that are held at once: 16 MiB in float32."""


class CannotExtend(Exception):
    """A layer of this model reads a document from its beginning only."""


@dataclass
class ExtendPass(PrefillPass):
    """A prefill behind positions that the rows hold.

    rows    the row of each document; first: positions that it holds before the pass; ends: after it
    """

    rows: list[int] = field(kw_only=True)
    first: list[int] = field(kw_only=True)
    ends: list[int] = field(kw_only=True)

    @property
    def longest(self) -> int:
        return max(self.ends)

    def remember(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Cache the new values; return those of all positions of all documents, [N, …]."""
        self.cache.write(layer, self.rows_T, self.positions_T, new)
        places = list(zip(self.rows, self.ends, strict=True))
        return tuple(
            torch.cat([store[row, :end] for row, end in places]) for store in self.cache.layers[layer]
        )

    def attend(
        self,
        q_THd: Tensor,
        k_NGd: Tensor,
        v_NGv: Tensor,
        scale: float,
        *,
        mask: Mask = CAUSAL,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Document by document, in blocks of queries."""
        new = [end - first for first, end in zip(self.first, self.ends, strict=True)]
        documents = zip(q_THd.split(new), k_NGd.split(self.ends), v_NGv.split(self.ends), strict=True)
        out = [
            _attend(q, k, v, scale, first, mask, softcap, sinks_H)
            for (q, k, v), first in zip(documents, self.first, strict=True)
        ]
        return torch.cat(out)

    def _cannot(self, *_arguments: Any, **_options: Any) -> NoReturn:
        raise CannotExtend

    leave = convolve = recur = pool = shorten = remember_entries = summarise = _cannot
    select = select_entries = select_blocks = attend_selected = attend_entries = attend_blocks = _cannot


def _attend(
    q_MHd: Tensor,
    k_nGd: Tensor,
    v_nGv: Tensor,
    scale: float,
    first: int,
    mask: Mask,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention of the queries at first, first + 1, … to the keys of their document. -> [M, H, v]."""
    heads, groups = q_MHd.shape[1], k_nGd.shape[1]
    size = max(1, SCORES // (heads * len(k_nGd)))
    out = q_MHd.new_empty(len(q_MHd), heads, v_nGv.shape[-1])
    for begin in range(0, len(q_MHd), size):
        q = q_MHd[begin : begin + size]
        low = first + begin  # position of the block's first query
        end = low + len(q)
        start = 0 if mask.window is None else max(0, low - mask.window + 1)
        if mask.chunk is not None:
            start = max(start, low // mask.chunk * mask.chunk)
        query = torch.arange(low, end, device=q.device)[:, None]
        seen_mn = mask.allowed(query, torch.arange(start, end, device=q.device))

        # the query heads that share a key head become its queries: [G, J m, d]
        q_GJmd = q.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        k_Gnd, v_Gnv = (x[start:end].transpose(0, 1) for x in (k_nGd, v_nGv))
        seen = seen_mn.repeat(heads // groups, 1)
        if softcap is None and sinks_H is None:
            o = F.scaled_dot_product_attention(
                q_GJmd[None], k_Gnd[None], v_Gnv[None], attn_mask=seen[None, None], scale=scale
            )[0]
        else:
            o = _by_scores(q_GJmd, k_Gnd, v_Gnv, scale, seen, softcap, sinks_H, len(q))
        out[begin : begin + size] = o.unflatten(1, (-1, len(q))).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _by_scores(
    q_GQd: Tensor,
    k_Gnd: Tensor,
    v_Gnv: Tensor,
    scale: float,
    seen_Qn: Tensor,
    softcap: float | None,
    sinks_H: Tensor | None,
    queries: int,
) -> Tensor:
    """Softcapped or sink attention (formulas: kernels/attention/by_blocks.py), in float32 at least."""
    wide = torch.promote_types(q_GQd.dtype, torch.float32)
    score_GQn = (q_GQd.to(wide) @ k_Gnd.to(wide).mT) * scale
    if softcap is not None:
        score_GQn = softcap * torch.tanh(score_GQn / softcap)
    score_GQn = score_GQn.masked_fill(~seen_Qn, -torch.inf)
    if sinks_H is not None:
        sink_GQ1 = sinks_H.to(wide).view(len(q_GQd), -1, 1).repeat_interleave(queries, dim=1)
        score_GQn = torch.cat((score_GQn, sink_GQ1), dim=-1)
    share_GQn = score_GQn.softmax(-1)[..., : k_Gnd.shape[1]]
    return (share_GQn @ v_Gnv.to(wide)).to(q_GQd.dtype)
