"""Storage of documents' tokens: in memory, or not at all, re-reading the data files instead."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unfreeze.core.errors import DataError
from unfreeze.data.rows.files import Again
from unfreeze.data.rows.row import RowPlace
from unfreeze.data.store.account import Reading
from unfreeze.data.store.encoding import EncodedRows
from unfreeze.data.store.examples import NUMBERS, Columns, Example
from unfreeze.data.tokens.asked import Asking
from unfreeze.data.tokens.compared import Comparing
from unfreeze.data.tokens.masks import Encoder


class Store(Protocol):
    """Stores the tokens of documents."""

    reading: Reading
    columns: Columns

    def add(self, part: EncodedRows) -> None:
        """Append the documents of the next rows, and their columns."""
        ...

    def fetch(self, index: int) -> Example:
        """Return document `index`, counted in the order of `add`."""
        ...


class Documents:
    """Documents as int32 tokens and float32 weights; more can be added.

    columns    metadata of each document
    starts_N   byte offset of each document in `tokens` and `weights`; None if they are contiguous
    """

    def __init__(self, columns: Columns, tokens: Any, weights: Any, starts_N: Any = None):
        self.columns, self._tokens, self._weights = columns, tokens, weights
        self._starts_N, self._num_bytes = array("q") if starts_N is None else starts_N, 0
        if starts_N is None:
            self._grow(columns)

    def _grow(self, columns: Columns) -> None:
        """Record the start offsets of the documents of `columns`, which are appended."""
        ends_N = self._num_bytes + np.cumsum(4 * np.array(columns.numbers[::NUMBERS], dtype=np.int64))
        starts_N = np.concatenate([[self._num_bytes], ends_N])
        self._starts_N.frombytes(starts_N[:-1].tobytes())
        self._num_bytes = int(starts_N[-1])

    def fetch(self, index: int) -> Example:
        numbers = self.columns.numbers[NUMBERS * index : NUMBERS * index + NUMBERS]
        length, _, cut, row, source, chosen = numbers.tolist()
        begin = int(self._starts_N[index])
        tokens, weights = array("i"), array("f")
        tokens.frombytes(self._tokens[begin : begin + 4 * length])
        weights.frombytes(self._weights[begin : begin + 4 * length])
        digest = bytes(self.columns.digests[16 * index : 16 * index + 16])
        return Example(tokens, weights, row, cut, source, digest, chosen)


class Held(Documents):
    """Documents in memory: 8 bytes per token."""

    reading: Reading = "memory"

    def __init__(self) -> None:
        super().__init__(Columns(), bytearray(), bytearray())

    def add(self, part: EncodedRows) -> None:
        self._grow(part.columns)
        self.columns.extend(part.columns)
        self._tokens += part.tokens
        self._weights += part.weights


class Continued:
    """Documents of a store that is full, followed by those of another."""

    def __init__(self, first: Store, rest: Store):
        self._first, self._rest = first, rest
        self.reading: Reading = rest.reading
        self.columns, self._count = first.columns, len(first.columns)

    def add(self, part: EncodedRows) -> None:
        self._rest.add(part)
        self.columns.extend(part.columns)

    def fetch(self, index: int) -> Example:
        before = index < self._count
        return self._first.fetch(index) if before else self._rest.fetch(index - self._count)


class OnDemand:
    """Documents as positions in their files (40 bytes each), read and encoded again at every access."""

    reading: Reading = "on demand"

    def __init__(
        self, paths: Sequence[Path], encoder: Encoder | Comparing | Asking, columns: Sequence[str] = ()
    ):
        self._paths, self._encoder, self._names = paths, encoder, columns
        self._places, self.columns = array("q"), Columns()
        self._files: dict[int, Again] = {}

    def add(self, part: EncodedRows) -> None:
        self._places.frombytes(part.places)
        self.columns.extend(part.columns)

    def fetch(self, index: int) -> Example:
        """Read and encode document i again.

        Raises DataError if the file has changed since it was first read, because the run's order of documents
        depends on its content.
        """
        source, row, offset, size, piece = self._places[5 * index : 5 * index + 5]
        path = self._paths[source]
        changed = DataError(
            f"{path.name}, row {row}: the file changed during training",
            next="start again, and leave the file unchanged during the run",
        )
        try:
            if source not in self._files:
                self._files[source] = Again(path, self._names, self._encoder.answers)
            pieces = self._encoder(self._files[source](RowPlace(row, offset, size))).examples
        except DataError:
            raise changed from None
        checksum = bytes(self.columns.checksums[16 * index : 16 * index + 16])
        if piece >= len(pieces) or pieces[piece].checksum != checksum:
            raise changed
        return replace(pieces[piece], source=source)
