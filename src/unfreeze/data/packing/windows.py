"""Windows of an epoch: groups of documents that are ordered and packed separately.

Whole      documents in memory or on disk: an epoch is one window
InWindows  large files that are encoded during training, window after window
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from unfreeze.core.errors import DataError
from unfreeze.data.packing.order import Order
from unfreeze.data.store.account import Stats
from unfreeze.data.store.examples import Examples


class Windows(Protocol):
    """Supplies `Batches` with documents and their order.

    count     windows per epoch
    known     True if all documents are at hand, so that a number of epochs gives a number of steps
    identity  everything a window depends on; plain JSON, stored in the cursor
    """

    count: int
    known: bool
    identity: dict[str, Any]

    def place(self, epoch: int, number: int) -> dict[str, int]:
        """Return a window's position as the cursor stores it."""
        ...

    def examples(self, epoch: int, number: int) -> Examples:
        """Return the window's documents; waits until they are encoded."""
        ...

    def order(self, epoch: int, count: int) -> Sequence[int]:
        """Return the order in which the `count` documents of a window are packed."""
        ...

    def take(self) -> None:
        """Collect documents encoded in the meantime; called before each batch."""
        ...


class Whole:
    """An epoch of documents that are all at hand, in one window."""

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
        """Do nothing: all documents are at hand."""


class InWindows:
    """An epoch of large files, in windows over a permutation of all rows.

    Stream (store/streamed.py) encodes them; Taken (store/handed.py) receives them from the process that does.

        size        rows per window
        num_rows    rows of all files
        head        documents of an evenly spaced sample of the training rows
        validation  documents held out; None if none were requested
        whole       all documents in file order, once every row is encoded here; None before that
        error       error of a bad row; nothing after that row is encoded
    """

    known = False
    head: Examples
    validation: Examples | None = None
    whole: Examples | None = None
    error: DataError | None = None

    def __init__(self, seed: int, size: int, count: int, num_rows: int, digest: str):
        """digest: hash of the bytes of all rows."""
        self.seed, self.size, self.count, self.num_rows, self.digest = seed, size, count, num_rows, digest
        self.identity: dict[str, Any] = {"seed": seed, "window_rows": size, "rows": digest}

    def place(self, epoch: int, number: int) -> dict[str, int]:
        return {"epoch": epoch, "window": number}

    def examples(self, epoch: int, number: int) -> Examples:
        """Return the documents of a window in training order; waits until its rows are encoded.

        Processes exchange a window when it is requested, so request each window exactly once.
        Raises DataError for a bad row in this window, or in an earlier one that was not yet available.
        """
        raise NotImplementedError

    def order(self, epoch: int, count: int) -> Sequence[int]:
        """Return the given order: the rows of a window are already drawn at random."""
        return range(count)

    def take(self) -> None:
        """Do nothing: no rows are encoded here."""

    def so_far(self) -> Examples:
        """Return all documents encoded here so far."""
        return Examples.of([])

    def stats(self) -> Stats:
        """Return the statistics of the rows encoded so far."""
        raise NotImplementedError
