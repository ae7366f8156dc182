"""Where the tokens of documents are kept: in memory, or nowhere, as the data files hold them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unfreeze.core.errors import DataError
from unfreeze.data.rows.files import Again
from unfreeze.data.rows.row import RowPlace
from unfreeze.data.store.account import Reading
from unfreeze.data.store.encoding import EncodedRows
from unfreeze.data.store.examples import NUMBERS, Columns, Example
from unfreeze.data.tokens.compared import Comparing
from unfreeze.data.tokens.masks import Encoder


class Store(Protocol):
    """Where the tokens of documents are kept."""

    reading: Reading

    def add(self, part: EncodedRows) -> None:
        """Keep the documents of the next rows."""
        ...

    def fetch(self, index: int) -> Example:
        """Document `index`, counted in the order of `add`."""
        ...


class Documents:
    """Documents that lie one after the other: int32 tokens, float32 weights, and their Columns."""

    def __init__(self, columns: Columns, tokens: Any, weights: Any):
        self._columns, self._tokens, self._weights = columns, tokens, weights

    @cached_property
    def _table(self) -> np.ndarray:
        return np.frombuffer(self._columns.numbers, dtype=np.int64).reshape(-1, NUMBERS)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self._table[:, 0])

    def fetch(self, index: int) -> Example:
        length, _, cut, row, source, chosen = self._table[index].tolist()
        end = 4 * int(self._ends[index])
        tokens, weights = array("i"), array("f")
        tokens.frombytes(self._tokens[end - 4 * length : end])
        weights.frombytes(self._weights[end - 4 * length : end])
        digest = bytes(self._columns.digests[16 * index : 16 * index + 16])
        return Example(tokens, weights, row, cut, source, digest, chosen)


class Held(Documents):
    """Documents in memory: 8 bytes a token."""

    reading: Reading = "memory"

    def __init__(self) -> None:
        super().__init__(Columns(), bytearray(), bytearray())

    def add(self, part: EncodedRows) -> None:
        self._columns.extend(part.columns)
        self._tokens += part.tokens
        self._weights += part.weights


class OnDemand:
    """Documents as places in their files (40 bytes each); read and encoded again at every visit."""

    reading: Reading = "on demand"

    def __init__(self, paths: Sequence[Path], encoder: Encoder | Comparing, columns: Sequence[str] = ()):
        self._paths, self._encoder, self._columns = paths, encoder, columns
        self._places = array("q")
        self._checksums = bytearray()
        self._files: dict[int, Again] = {}

    def add(self, part: EncodedRows) -> None:
        self._places.frombytes(part.places)
        self._checksums += part.columns.checksums

    def fetch(self, index: int) -> Example:
        """Read and encode document i again.

        Raises DataError if the file has changed since it was first read: the run's order of documents depends
        on its content.
        """
        source, row, offset, size, piece = self._places[5 * index : 5 * index + 5]
        path = self._paths[source]
        changed = DataError(
            f"{path.name}, row {row}: the file changed while it was trained on",
            next="start again with a file that stays as it is",
        )
        try:
            if source not in self._files:
                self._files[source] = Again(path, self._columns, self._encoder.answers)
            pieces = self._encoder(self._files[source](RowPlace(row, offset, size))).examples
        except DataError:
            raise changed from None
        if piece >= len(pieces) or pieces[piece].checksum != self._checksums[16 * index : 16 * index + 16]:
            raise changed
        return replace(pieces[piece], source=source)
