"""The windows of an epoch: documents that are ordered and packed by themselves.

Whole      documents in memory or on disk: an epoch is one window
InWindows  large files that are encoded while training goes on (store/streamed.py): window after window
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unfreeze.data.packing.order import Order
from unfreeze.data.store.examples import Examples

if TYPE_CHECKING:
    from unfreeze.data.store.handed import Taken
    from unfreeze.data.store.streamed import Stream


class Windows(Protocol):
    """Where `Batches` has documents and their order from.

    count     windows of an epoch
    known     whether all of them are at hand: then a number of epochs is a number of steps
    empty     windows without a document that may follow each other
    identity  what must be unchanged for a window to be the same; plain JSON, part of the cursor
    """

    count: int
    known: bool
    empty: float
    identity: dict[str, Any]

    def place(self, epoch: int, number: int) -> dict[str, int]:
        """A window as a cursor has it."""
        ...

    def examples(self, epoch: int, number: int) -> Examples:
        """Its documents; waits until they are encoded."""
        ...

    def order(self, epoch: int, count: int) -> Sequence[int]:
        """In which order the `count` documents of a window are packed."""
        ...

    def take(self) -> None:
        """Called before each batch: takes what was encoded meanwhile."""
        ...


class Whole:
    """An epoch of documents that are at hand, in one window."""

    count, known, empty = 1, True, math.inf  # an epoch of small data_weights can hold no document

    def __init__(self, examples: Examples, order: Order):
        self._examples, self._order = examples, order
        self.identity = order.identity

    def place(self, epoch: int, number: int) -> dict[str, int]:
        return {"epoch": epoch}

    def examples(self, epoch: int, number: int) -> Examples:
        return self._examples

    def order(self, epoch: int, count: int) -> Sequence[int]:
        return self._order(epoch)

    def take(self) -> None:
        """All is there."""


class InWindows:
    """An epoch of large files, in windows of rows that a permutation of all of them gave.

    It is opened once for each window: processes hand a window on as it is asked for.
    """

    known = False

    def __init__(self, stream: Stream | Taken):
        self._stream, self.seed = stream, stream.seed
        self.count, self.empty = stream.windows, float(stream.windows)
        self.identity: dict[str, Any] = {
            "seed": stream.seed,
            "window_rows": stream.size,
            "rows": stream.rows.digest,
        }

    def place(self, epoch: int, number: int) -> dict[str, int]:
        return {"epoch": epoch, "window": number}

    def examples(self, epoch: int, number: int) -> Examples:
        """Raises DataError for what `stream.window` refuses."""
        return self._stream.window(epoch, number)

    def order(self, epoch: int, count: int) -> Sequence[int]:
        """As they come: the rows of a window are drawn at random already."""
        return range(count)

    def take(self) -> None:
        self._stream.take()
