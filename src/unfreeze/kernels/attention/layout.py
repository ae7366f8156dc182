"""Arranges the documents of a packed batch in the rectangles that attention needs.

Documents of similar length share a bucket: one rectangle [S_b, L_b] and so one attention call. Padding is on
the right, where causal attention needs no mask: a real query never looks to its right, and the results of
padded queries are dropped.

T tokens of the batch, N >= T slots of all rectangles end to end, S documents, b a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from unfreeze.core.batch import send

Value = TypeVar("Value")
# documents up to this length share one bucket: their padding costs less than a second attention call
SHORT_DOCUMENT = 64
FILL = 0.75  # longer documents join a bucket if they fill at least this share of its length


@dataclass(frozen=True)
class Bucket:
    """`num_documents` documents padded to `length` tokens each."""

    num_documents: int
    length: int

    @property
    def num_slots(self) -> int:
        return self.num_documents * self.length


class Beyond(NamedTuple):
    """The documents of a layout that are longer than some limit, and the others.

    longer   tokens of each longer document
    rows_N   int64, the tokens of the others; shorter: their layout. None: all are longer
    order_T  int64, the place of each token in (those of the others, those of each longer document); None: the
             tokens are in this order
    """

    longer: tuple[slice, ...]
    rows_N: Tensor | None
    shorter: DocumentLayout | None
    order_T: Tensor | None


@dataclass(frozen=True)
class DocumentLayout:
    """Built once per batch, used by every layer.

    source_N  int64, the token in each slot; padding repeats its document's first token. None: the slots are
              the tokens, in order.
    slot_T    int64, the slot of each token, the inverse of source_N without the padding. None as above.
    starts    the start of each document, on the host
    """

    num_tokens: int
    buckets: tuple[Bucket, ...]
    source_N: Tensor | None
    slot_T: Tensor | None
    starts: tuple[int, ...] = ()
    device: torch.device | str = "cpu"
    _cuts: dict[int, DocumentLayout] = field(default_factory=dict, compare=False, repr=False)
    _beyond: dict[int, Beyond] = field(default_factory=dict, compare=False, repr=False, init=False)
    _made: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False, init=False)
    _bounds: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False, init=False)

    @staticmethod
    def build(
        starts: Tensor | Sequence[int], num_tokens: int, device: torch.device | str = "cpu"
    ) -> DocumentLayout:
        """Build the layout of documents that start at `starts`; the last one stops at `num_tokens`.

        starts: on the host, ascending, the first is 0. All arithmetic is on the host; index tensors go to
        `device` once. Raises ValueError if a document would be empty.
        """
        starts_S = torch.as_tensor(starts, dtype=torch.int64)
        if starts_S.device.type != "cpu":
            raise ValueError(
                f"starts is on {starts_S.device}; reading it there would synchronise, keep it on the host"
            )
        places = tuple(starts_S.tolist())
        lengths_S = torch.diff(starts_S, append=torch.tensor([num_tokens]))
        if starts_S.numel() == 0 or starts_S[0] != 0 or bool((lengths_S <= 0).any()):
            raise ValueError(
                f"starts must begin with 0 and ascend below num_tokens={num_tokens}, got"
                f" {starts_S.tolist()[:8]}"
            )
        if bool((lengths_S == lengths_S[0]).all()):  # one document, or all of one length: nothing to move
            only = Bucket(lengths_S.numel(), int(lengths_S[0]))
            return DocumentLayout(num_tokens, (only,), None, None, places, device)

        order_S = torch.argsort(lengths_S, descending=True, stable=True)
        buckets = _group(lengths_S[order_S].tolist())
        source, slot_T = [], torch.empty(num_tokens, dtype=torch.int64)
        first_document = first_slot = 0
        for bucket in buckets:
            documents = order_S[first_document : first_document + bucket.num_documents]
            offset_L = torch.arange(bucket.length)
            real_SL = offset_L < lengths_S[documents, None]
            token_SL = starts_S[documents, None] + torch.where(real_SL, offset_L, 0)
            slot_SL = first_slot + torch.arange(bucket.num_slots).view(-1, bucket.length)
            slot_T[token_SL[real_SL]] = slot_SL[real_SL]
            source.append(token_SL.flatten())
            first_document += bucket.num_documents
            first_slot += bucket.num_slots
        moved = send(torch.cat(source), device), send(slot_T, device)
        return DocumentLayout(num_tokens, tuple(buckets), *moved, places, device)

    def cut(self, chunk: int) -> DocumentLayout:
        """The layout of the same tokens with documents cut into pieces of `chunk` tokens. Cached."""
        if all(bucket.length <= chunk for bucket in self.buckets):
            return self
        if chunk not in self._cuts:
            ends = (*self.starts[1:], self.num_tokens)
            pieces = [
                place
                for begin, end in zip(self.starts, ends, strict=True)
                for place in range(begin, end, chunk)
            ]
            self._cuts[chunk] = DocumentLayout.build(pieces, self.num_tokens, self.device)
        return self._cuts[chunk]

    def beyond(self, limit: int) -> Beyond:
        """The documents of more than `limit` tokens, apart from the others. Cached."""
        if limit not in self._beyond:
            ends = (*self.starts[1:], self.num_tokens)
            documents = [slice(*bounds) for bounds in zip(self.starts, ends, strict=True)]
            longer = tuple(rows for rows in documents if rows.stop - rows.start > limit)
            others = [rows for rows in documents if rows.stop - rows.start <= limit]
            rows_N = torch.cat([torch.arange(rows.start, rows.stop) for rows in (*others, *longer)])
            moved, shorter = not bool((rows_N[1:] > rows_N[:-1]).all()), None
            if others:
                starts = torch.tensor([0, *(rows.stop - rows.start for rows in others)]).cumsum(0)
                shorter = DocumentLayout.build(starts[:-1], int(starts[-1]), self.device)
            self._beyond[limit] = Beyond(
                longer,
                None if shorter is None else send(rows_N[: shorter.num_tokens], self.device),
                shorter,
                send(rows_N.argsort(), self.device) if moved else None,
            )
        return self._beyond[limit]

    def once(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """build(), kept under `key`: places that depend on this layout, such as kernels/compressed's."""
        if key not in self._made:
            self._made[key] = build()
        return self._made[key]

    def bounds(self, device: torch.device) -> Tensor:
        """Document s is the tokens bounds[s]:bounds[s + 1]; int32 [S + 1] on `device`. Sent there once."""
        if device not in self._bounds:
            self._bounds[device] = send(
                torch.tensor((*self.starts, self.num_tokens), dtype=torch.int32), device
            )
        return self._bounds[device]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(bucket.length for bucket in self.buckets)

    @property
    def num_slots(self) -> int:
        """N."""
        return sum(bucket.num_slots for bucket in self.buckets)


def _group(lengths: list[int]) -> list[Bucket]:
    """Make buckets for descending `lengths`.

    A document opens a new one if it would leave more than a quarter of its row empty.
    """
    buckets: list[Bucket] = []
    for length in lengths:
        last = buckets[-1] if buckets else None
        if last is not None and (last.length <= SHORT_DOCUMENT or length >= FILL * last.length):
            buckets[-1] = Bucket(last.num_documents + 1, last.length)
        else:
            buckets.append(Bucket(1, length))
    return buckets
