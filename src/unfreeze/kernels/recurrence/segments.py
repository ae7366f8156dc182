"""Places of the tokens of a packed batch when a recurrence runs over them in chunks.

Documents are sorted by length, longest first, and cut into chunks of C tokens. A segment is as many whole
documents as fit, or a part of one. Its documents advance together: step i is the i-th chunk of each that has
one. Backward computes one segment at a time again, so its size bounds the workspace, whatever the number and
the length of documents; and one state is carried from a segment into the next, if a document goes on.

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
    """Whole documents, or a part of one.

    chunk     C
    steps     the number of documents in each step, descending: step i belongs to the first counts[i]
    tokens_t  int64, the tokens of the segment; slots_t: their places among its n · C slots
    place     of its first document among all documents, longest first
    begins    True if its documents begin here: their states are zero
    goes_on   True if its document goes on in the next segment
    """

    chunk: int
    steps: Steps
    tokens_t: Tensor
    slots_t: Tensor
    place: int
    begins: bool
    goes_on: bool

    @property
    def chunks(self) -> int:
        return sum(self.steps.counts)

    @property
    def documents(self) -> int:
        return self.steps.counts[0]

    @property
    def places(self) -> slice:
        """Places of its documents, longest first."""
        return slice(self.place, self.place + self.documents)


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
            together = max(1, most // -(-longest // chunk))
            some_S = order_S[place : place + together]
            each += _of(starts_S[some_S], lengths_S[some_S], chunk, most, place, device)
            place += len(some_S)
        return Segments(tuple(each), send(order_S, device), send(starts_S + lengths_S - 1, device))


def _of(
    starts_S: Tensor, lengths_S: Tensor, chunk: int, most: int, place: int, device: torch.device | str
) -> list[Segment]:
    """The segment of documents that fit in one, longest first, or those of one document."""
    chunks_S = -(-lengths_S // chunk)
    counts = [int((chunks_S > step).sum()) for step in range(int(chunks_S[0]))]
    segments = list[Segment]()
    for begin in range(0, len(counts), most):
        end = min(begin + most, len(counts))
        tokens_t, slots_t = _places(starts_S, lengths_S, counts, begin, end, chunk)
        places = send(tokens_t, device), send(slots_t, device)
        steps = Steps.of(tuple(counts[begin:end]), device)
        segments.append(Segment(chunk, steps, *places, place, begin == 0, end < len(counts)))
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
