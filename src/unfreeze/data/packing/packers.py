"""How the documents of an epoch become batches: which batch each of them goes into.

A packer is (order, lengths, capacity) -> the number of the batch of each document in `order`. Batches are
numbered in the order they are begun: those of short documents first, as long ones begin new ones more often.
So an epoch takes them in a random order (`shuffled`). N documents, B batches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

Packing = Literal["none", "first_fit", "best_fit"]

MAX_OPEN_BATCHES = 64
"""First fit looks back at this many unfinished batches, so the search is O(documents · 64). With documents of
a tenth of a step, less than 1 % of the token budget then stays unused (held by its test)."""


class PackingPlan(Sequence[list[int]]):
    """The batches of an epoch as lists of document indices, in two arrays: 8 bytes a document and a batch."""

    def __init__(self, order: Sequence[int], placed: Sequence[int]):
        order_N, placed_N = np.array(order, dtype=np.int64), np.array(placed, dtype=np.int64)
        self._members_N = order_N[np.argsort(placed_N, kind="stable")]  # in a batch as in `order`
        self._ends_B = np.cumsum(np.bincount(placed_N))

    def shuffled(self, seed: Sequence[int]) -> PackingPlan:
        """The same batches in a random order, a pure function of `seed`."""
        order_B = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,))).permutation(len(self))
        counts_B = np.diff(self._ends_B, prepend=0)
        place_B = np.empty_like(order_B)
        place_B[order_B] = np.arange(len(self))
        return PackingPlan(self._members_N.tolist(), np.repeat(place_B, counts_B).tolist())

    def __len__(self) -> int:
        return len(self._ends_B)

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        end = self._ends_B[index]
        begin = self._ends_B[index - 1] if index % len(self) else 0
        return self._members_N[begin:end].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        return (self[index] for index in range(len(self)))

    def efficiency(self, lengths_N: np.ndarray, capacity: int) -> float:
        """Tokens in the batches, supervised or not, over what the batches could hold."""
        return int(lengths_N[self._members_N].sum()) / (max(len(self), 1) * capacity)


def first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[int]:
    """Put each document into the first unfinished batch that has room.

    At most MAX_OPEN_BATCHES stay unfinished: beyond it the oldest is closed.
    """
    placed: list[int] = []
    begun, shortest = 0, min(lengths)
    batches: list[int] = []  # unfinished, oldest first, and the room each has left
    rooms: list[int] = []
    for index in order:
        length = lengths[index]
        for slot, room in enumerate(rooms):  # noqa: B007 - the slot it ends at
            if room >= length:
                break
        else:
            slot, room = len(rooms), capacity
            batches.append(begun)
            rooms.append(capacity)
            begun += 1
        placed.append(batches[slot])
        room -= length
        if room < shortest:
            del batches[slot], rooms[slot]
        else:
            rooms[slot] = room
            if len(rooms) > MAX_OPEN_BATCHES:
                del batches[0], rooms[0]
    return placed


def best_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[int]:
    """Put each document into the unfinished batch that it fills best.

    O(N log N): unfinished batches are kept sorted by the room they have left, and all stay open.
    """
    placed: list[int] = []
    begun, shortest = 0, min(lengths)
    rooms: list[tuple[int, int]] = []  # (room left, batch), least room first
    for index in order:
        slot = bisect_left(rooms, (lengths[index], 0))
        room, batch = rooms.pop(slot) if slot < len(rooms) else (capacity, begun)
        begun += batch == begun
        placed.append(batch)
        if room - lengths[index] >= shortest:
            insort(rooms, (room - lengths[index], batch))
    return placed


def one_by_one(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[int]:
    """Every document is a batch of its own."""
    return list(range(len(order)))


PACKERS: dict[str, Callable[[Sequence[int], Sequence[int], int], list[int]]] = {
    "none": one_by_one,
    "first_fit": first_fit,
    "best_fit": best_fit,
}
