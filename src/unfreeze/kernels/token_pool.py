"""Means of every `by` tokens of a document, and their way back to tokens that may know them.

Group j of a document is its tokens j · by to j · by + by - 1; it is complete at the last of them. Tokens left
over behind the last complete group belong to none. Token t reads the last group that is complete at t, so
nothing of a later token; the first by - 1 tokens of a document read none:

    pool(x)_e = 1 / by · Σ x_t over the group's tokens,    carry(y)_t = y_e of the group that t reads, or 0

A document shorter than `by` has one group of all its tokens, which nobody reads: then every document has a
place in the shortened batch. Backward of each function is the sum or the spread of the other; no two sums
meet, so gradients are the same bit for bit each time.

T tokens, E groups, S documents, b = by, or the tokens of the longest document if they are fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unfreeze.core.batch import send


@dataclass(frozen=True)
class Spread:
    """Rows of T and rows of E that belong together.

    rows_Eb  int64, the rows of T of each row of E; real_Eb: False for padding, None: there is none
    of_T     int64, the row of E of each row of T; -1: none
    """

    rows_Eb: Tensor
    real_Eb: Tensor | None
    of_T: Tensor

    def sums(self, x_TD: Tensor) -> Tensor:
        """Σ x over the rows of each row of E, in float32 at least."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        x_EbD = x_TD[self.rows_Eb]
        if self.real_Eb is not None:
            x_EbD = x_EbD.masked_fill(~self.real_Eb[..., None], 0)
        return x_EbD.sum(1, dtype=wide)

    def spread(self, y_ED: Tensor) -> Tensor:
        """y of each row of T, 0 where it has none."""
        return y_ED[self.of_T.clamp(min=0)].masked_fill(self.of_T[:, None] < 0, 0)


@dataclass(frozen=True)
class Groups:
    """The groups of a packed batch.

    starts      the first group of each document, on the host
    members     tokens and the group that they make; readers: tokens and the group that they read
    size_E1     tokens of each group, float32
    last_E      its last token; host_E: the same on the host
    index_E     its number in its document
    complete_E  False for the only group of a document shorter than `by`; complete_S: the same by document
    final_S     the last group of each document
    open_Sb     the tokens behind it, of which the next group will be made; real_Sb: False for padding
    """

    starts: tuple[int, ...]
    members: Spread
    readers: Spread
    size_E1: Tensor
    last_E: Tensor
    host_E: Tensor
    index_E: Tensor
    complete_E: Tensor
    complete_S: Tensor
    final_S: Tensor
    open_Sb: Tensor
    real_Sb: Tensor

    @property
    def count(self) -> int:
        """E."""
        return len(self.host_E)

    @staticmethod
    def build(starts: tuple[int, ...], num_tokens: int, by: int, device: torch.device | str) -> Groups:
        """Groups of `by` tokens of documents that begin at `starts`; the last one ends at num_tokens."""
        starts_S = torch.tensor(starts)
        ends_S = torch.tensor((*starts[1:], num_tokens))
        counts_S = ((ends_S - starts_S) // by).clamp(min=1)
        firsts_S = counts_S.cumsum(0) - counts_S
        document_E = torch.arange(len(starts)).repeat_interleave(counts_S)
        index_E = torch.arange(len(document_E)) - firsts_S[document_E]
        begin_E, end_E = starts_S[document_E] + index_E * by, ends_S[document_E]
        offsets_b = torch.arange(min(by, int((ends_S - starts_S).max())))
        complete_E = begin_E + by <= end_E

        def spread(first_E: Tensor, counts_E: Tensor) -> Spread:
            rows_Eb, real_Eb = first_E[:, None] + offsets_b, offsets_b < counts_E[:, None]
            of_T = torch.full((num_tokens,), -1)
            of_T[rows_Eb[real_Eb]] = torch.arange(len(rows_Eb)).repeat_interleave(real_Eb.sum(1))
            rows_Eb = torch.where(real_Eb, rows_Eb, first_E[:, None])
            padded = None if bool(real_Eb.all()) else send(real_Eb, device)
            return Spread(send(rows_Eb, device), padded, send(of_T, device))

        sizes_E = (end_E - begin_E).clamp(max=by)
        last_E = begin_E + sizes_E - 1
        readers_E = torch.where(complete_E, (end_E - last_E).clamp(max=by), 0)
        left_S = (ends_S - starts_S) % by
        open_Sb, real_Sb = (ends_S - left_S)[:, None] + offsets_b, offsets_b < left_S[:, None]
        return Groups(
            tuple(firsts_S.tolist()),
            spread(begin_E, sizes_E),
            spread(last_E, readers_E),
            send(sizes_E[:, None].float(), device),
            send(last_E, device),
            last_E,
            send(index_E, device),
            send(complete_E, device),
            send(complete_E[firsts_S], device),
            send(firsts_S + counts_S - 1, device),
            send(torch.where(real_Sb, open_Sb, 0), device),
            send(real_Sb, device),
        )


def pool(x_TD: Tensor, groups: Groups) -> Tensor:
    """The mean of each group, [E, D] in x's dtype."""
    return _Pool.apply(x_TD, groups)


def carry(y_ED: Tensor, groups: Groups) -> Tensor:
    """y of the group that each token reads, [T, D]; 0 where it reads none."""
    return _Carry.apply(y_ED, groups)


def open_sums(x_TD: Tensor, groups: Groups) -> Tensor:
    """Σ x over the tokens behind the last complete group of each document, [S, D] in float32 at least."""
    return Spread(groups.open_Sb, groups.real_Sb, groups.open_Sb).sums(x_TD)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return (groups.members.sums(x_TD) / groups.size_E1).to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, dp_ED: Tensor) -> tuple[Tensor, None]:
        groups = ctx.groups
        return groups.members.spread((dp_ED / groups.size_E1).to(dp_ED.dtype)), None


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_ED: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return groups.readers.spread(y_ED)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None]:
        return ctx.groups.readers.sums(dy_TD).to(dy_TD.dtype), None
