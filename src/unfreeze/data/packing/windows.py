"""The windows of an epoch: documents that are ordered and packed by themselves.

Whole      documents in memory or on disk: an epoch is one window
InWindows  large files that are encoded while training goes on: window after window
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from unfreeze.core.errors import DataError
from unfreeze.data.packing.order import Order
from unfreeze.data.store.account import Stats
from unfreeze.data.store.examples import Examples


class Windows(Protocol):
    """Where `Batches` has documents and their order from.

    count     windows of an epoch
    known     whether all of them are at hand: then a number of epochs is a number of steps
    identity  what must be unchanged for a window to be the same; plain JSON, part of the cursor
    """

    count: int
    known: bool
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

    count, known = 1, True

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

    Stream (store/streamed.py) encodes them, Taken (store/handed.py) takes them from the process that does.

    size        rows of a window        num_rows    of all files
    head        documents of some rows at even distances, of those that are trained on
    validation  documents held out; None if not asked for
    whole       all documents in the order of the files, once every row is encoded here; None before
    error       of a bad row, behind which nothing is encoded
    """

    known = False
    head: Examples
    validation: Examples | None = None
    whole: Examples | None = None
    error: DataError | None = None

    def __init__(self, seed: int, size: int, count: int, num_rows: int, digest: str):
        """digest: of the bytes of all rows."""
        self.seed, self.size, self.count, self.num_rows, self.digest = seed, size, count, num_rows, digest
        self.identity: dict[str, Any] = {"seed": seed, "window_rows": size, "rows": digest}

    def place(self, epoch: int, number: int) -> dict[str, int]:
        return {"epoch": epoch, "window": number}

    def examples(self, epoch: int, number: int) -> Examples:
        """The documents of a window in the order of training; waits until its rows are encoded.

        Processes hand a window on as it is asked for: ask once for each.
        Raises DataError for a bad row in it, or in one before it that was not there yet.
        """
        raise NotImplementedError

    def order(self, epoch: int, count: int) -> Sequence[int]:
        """As they come: the rows of a window are drawn at random already."""
        return range(count)

    def take(self) -> None:
        """Nothing is encoded here."""

    def so_far(self) -> Examples:
        """All documents that are encoded here by now."""
        return Examples.of([])

    def stats(self) -> Stats:
        """The account of the rows that are encoded by now."""
        raise NotImplementedError
