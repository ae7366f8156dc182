"""Where the tokens of a packed batch lie when a recurrence runs over them in chunks.

Documents are sorted by length, longest first, and cut into chunks of C tokens. Step i is the i-th chunk of
every document that has one, so all documents advance together. A segment is a run of steps; backward
computes one segment at a time again.

T tokens, n chunks of a segment, C tokens of a chunk, S documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.core.batch import send
from unfreeze.kernels.state_scan import Steps

CHUNK = 64
SLOTS = {"cpu": 512, "cuda": 4096}
"""Slots of a segment: they bound the workspace. A step of more documents is a segment of its own."""


@dataclass(frozen=True)
class Segment:
    """Some steps.

    steps     the documents in each step, descending: step i belongs to the first counts[i] documents
    tokens_t  int64, the tokens of the segment, and slots_t, their places among its n · C slots
    after     documents that go on behind the segment
    """

    steps: Steps
    tokens_t: Tensor
    slots_t: Tensor
    after: int

    @property
    def chunks(self) -> int:
        return sum(self.steps.counts)

    @property
    def documents(self) -> int:
        return self.steps.counts[0]


@dataclass(frozen=True)
class Segments:
    """The segments of a batch, in order; `order_S`: the document at each place, longest first."""

    chunk: int
    each: tuple[Segment, ...]
    order_S: Tensor
    last_S: Tensor

    @staticmethod
    def build(starts: Sequence[int], num_tokens: int, device: torch.device | str) -> Segments:
        """Segments of documents that begin at `starts`; the last one ends at num_tokens."""
        starts_S = torch.tensor(starts)
        lengths_S = torch.diff(starts_S, append=torch.tensor([num_tokens]))
        order_S = torch.argsort(lengths_S, descending=True, stable=True)
        longest = int(lengths_S.max())
        size = min(CHUNK, max(16, 1 << (longest - 1).bit_length()))
        chunks_S = -(-lengths_S[order_S] // size)
        counts = [int((chunks_S > step).sum()) for step in range(int(chunks_S[0]))]
        each, begin, slots = [], 0, SLOTS.get(torch.device(device).type, SLOTS["cuda"])
        while begin < len(counts):
            end, total = begin + 1, counts[begin]
            while end < len(counts) and (total + counts[end]) * size <= slots:
                total, end = total + counts[end], end + 1
            each.append(_segment(counts, begin, end, size, starts_S[order_S], lengths_S[order_S], device))
            begin = end
        last_S = starts_S + lengths_S - 1
        return Segments(size, tuple(each), send(order_S, device), send(last_S, device))


def _segment(
    counts: list[int],
    begin: int,
    end: int,
    size: int,
    starts_S: Tensor,
    lengths_S: Tensor,
    device: torch.device | str,
) -> Segment:
    """Steps begin to end; starts and lengths are in the order of the documents' lengths."""
    offsets, tokens, slots, chunk = torch.arange(size), [], [], 0
    for step in range(begin, end):
        count = counts[step]
        place_SC = step * size + offsets.expand(count, size)
        real_SC = place_SC < lengths_S[:count, None]
        slot_SC = (chunk + torch.arange(count))[:, None] * size + offsets
        tokens.append((starts_S[:count, None] + place_SC)[real_SC])
        slots.append(slot_SC[real_SC])
        chunk += count
    after = counts[end] if end < len(counts) else 0
    return Segment(
        Steps.of(tuple(counts[begin:end]), device),
        send(torch.cat(tokens), device),
        send(torch.cat(slots), device),
        after,
    )
