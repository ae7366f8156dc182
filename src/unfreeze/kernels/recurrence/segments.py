"""Places of the tokens of a packed batch when a recurrence runs over them in chunks.

Documents are sorted by length, longest first, and taken a group at a time. Those of a group are cut into
chunks of C tokens and advance together: step i is the i-th chunk of each document that has one. A segment is
a run of steps of a group. Backward computes one segment at a time again, so its size bounds the workspace,
whatever the number and the length of documents.

T tokens, n chunks of a segment, C tokens of a chunk, S documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.core.batch import send
from unfreeze.kernels.state_scan import Steps

CHUNK, LEAST_CHUNK = 64, 16
CHUNKS = {"cpu": 8, "cuda": 32}
"""Most chunks of a segment. Each has states, however short it is, so they bound the workspace."""


@dataclass(frozen=True)
class Segment:
    """Some steps of a group of documents.

    chunk     C
    steps     the number of documents in each step, descending: step i belongs to the first counts[i]
    tokens_t  int64, the tokens of the segment; slots_t: their places among its n · C slots
    place     of the group's first document among all documents, longest first
    begins    True for the first segment of a group, whose states are zero
    after     documents that go on behind the segment: the first ones
    """

    chunk: int
    steps: Steps
    tokens_t: Tensor
    slots_t: Tensor
    place: int
    begins: bool
    after: int

    @property
    def chunks(self) -> int:
        return sum(self.steps.counts)

    @property
    def documents(self) -> int:
        return self.steps.counts[0]

    @property
    def ending(self) -> slice:
        """Places of the documents that end in this segment."""
        return slice(self.place + self.after, self.place + self.documents)


@dataclass(frozen=True)
class Segments:
    """The segments of a batch, in order.

    order_S  the document at each place, longest first; last_S: the last token of each document
    """

    each: tuple[Segment, ...]
    order_S: Tensor
    last_S: Tensor

    @staticmethod
    def build(starts: tuple[int, ...], num_tokens: int, device: torch.device | str) -> Segments:
        """Segments of documents that begin at `starts`; the last one ends at num_tokens."""
        starts_S = torch.tensor(starts)
        lengths_S = torch.diff(starts_S, append=torch.tensor([num_tokens]))
        order_S = torch.argsort(lengths_S, descending=True, stable=True)
        most = CHUNKS.get(torch.device(device).type, CHUNKS["cuda"])
        each, place = list[Segment](), 0
        while place < len(starts):
            longest = int(lengths_S[order_S[place]])
            chunk = min(CHUNK, max(LEAST_CHUNK, 1 << (longest - 1).bit_length()))
            group_S = order_S[place : place + most]
            each += _of_group(starts_S[group_S], lengths_S[group_S], chunk, most, place, device)
            place += len(group_S)
        return Segments(tuple(each), send(order_S, device), send(starts_S + lengths_S - 1, device))


def _of_group(
    starts_S: Tensor, lengths_S: Tensor, chunk: int, most: int, place: int, device: torch.device | str
) -> list[Segment]:
    """The segments of a group of at most `most` documents, longest first."""
    chunks_S = -(-lengths_S // chunk)
    counts = [int((chunks_S > step).sum()) for step in range(int(chunks_S[0]))]
    segments, begin = list[Segment](), 0
    while begin < len(counts):
        end, total = begin + 1, counts[begin]
        while end < len(counts) and total + counts[end] <= most:
            total, end = total + counts[end], end + 1
        tokens_t, slots_t = _places(starts_S, lengths_S, counts, begin, end, chunk)
        steps, after = Steps.of(tuple(counts[begin:end]), device), counts[end] if end < len(counts) else 0
        places = send(tokens_t, device), send(slots_t, device)
        segments.append(Segment(chunk, steps, *places, place, begin == 0, after))
        begin = end
    return segments


def _places(
    starts_S: Tensor, lengths_S: Tensor, counts: list[int], begin: int, end: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """(tokens, slots) of the steps begin to end, without padding."""
    offsets, tokens, slots, before = torch.arange(chunk), [], [], 0
    for step in range(begin, end):
        count = counts[step]
        place_SC = step * chunk + offsets.expand(count, chunk)
        real_SC = place_SC < lengths_S[:count, None]
        slot_SC = (before + torch.arange(count))[:, None] * chunk + offsets
        tokens.append((starts_S[:count, None] + place_SC)[real_SC])
        slots.append(slot_SC[real_SC])
        before += count
    return torch.cat(tokens), torch.cat(slots)
