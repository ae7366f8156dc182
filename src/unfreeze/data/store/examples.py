"""Documents as tokens and weights, and a sequence of them that need not be in memory.

Axis: N documents. `Examples` stores a few numbers per document (about 90 bytes). Tokens are in memory, or
are read and encoded again on access, so that a file larger than memory can be trained on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

NO_CONTENT = bytes(16)
TAUGHT = -1
"""Example.chosen of a document that is not compared with another answer."""


@dataclass(frozen=True)
class Example:
    """One document before the shift: weights[i] is nonzero if token i counts as a *target*.

    weights[0] is 0 by construction: nothing precedes the first token, so nothing can predict it.

        row      its line in data file number `source`
        cut      number of tokens removed by truncation
        digest   16-byte hash of the row's content (data/rows/row.py); equal for equal content and
                 for pieces of one text
        chosen   for compared answers: the number of tokens of the chosen answer's document; the tokens after
                 them are the rejected one's. For a labelled answer it is all tokens, or 0. -1: not compared
    """

    tokens: Sequence[int]
    weights: Sequence[float]
    row: int = 0
    cut: int = 0
    source: int = 0
    digest: bytes = NO_CONTENT
    chosen: int = TAUGHT

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_supervised(self) -> int:
        """Number of targets that carry loss after the shift."""
        if isinstance(self.weights, list):  # in C, for the usual case of a row just encoded
            return len(self.weights) - self.weights.count(0.0) - any(self.weights[:1])
        return sum(map(bool, self.weights[1:]))

    @property
    def checksum(self) -> bytes:
        """16-byte hash over every token and weight."""
        return checksum_of(np.asarray(self.tokens, dtype=np.int64), np.asarray(self.weights), self.chosen)

    @property
    def has_label(self) -> bool:
        """True for a labelled answer, which is not compared with another one."""
        return self.chosen in (0, self.num_tokens)

    @property
    def packed_tokens(self) -> int:
        """Number of tokens in a batch; a labelled answer also brings an answer to another prompt."""
        return self.num_tokens * (1 + self.has_label)

    def documents(self) -> list[Example]:
        """Return the separate documents in a batch: the two answers of a pair, else the example itself."""
        if self.chosen == TAUGHT or self.has_label:
            return [self]
        return [
            replace(self, tokens=self.tokens[part], weights=self.weights[part], chosen=TAUGHT)
            for part in (slice(None, self.chosen), slice(self.chosen, None))
        ]


def checksum_of(tokens_T: np.ndarray, weights_T: np.ndarray, chosen: int = TAUGHT) -> bytes:
    """Return Example.checksum of T tokens and weights, hashed as int64 and float64 whatever their dtype."""
    digest = hashlib.blake2b(len(tokens_T).to_bytes(8, "little"), digest_size=16)
    digest.update(tokens_T.astype(np.int64).tobytes())
    digest.update(weights_T.astype(np.float64).tobytes())
    if chosen != TAUGHT:
        digest.update(chosen.to_bytes(8, "little"))
    return digest.digest()


NUMBERS = 6
"""Fields of a document in Columns.numbers."""


class Columns:
    """Metadata of each document, without its tokens; grows row by row."""

    def __init__(self) -> None:
        self.numbers = array("q")
        self.digests = bytearray()
        self.checksums = bytearray()

    def __len__(self) -> int:
        return len(self.numbers) // NUMBERS

    @classmethod
    def of(cls, numbers: bytes, digests: bytes, checksums: bytes) -> Columns:
        columns = cls()
        columns.numbers.frombytes(numbers)
        columns.digests += digests
        columns.checksums += checksums
        return columns

    def extend(self, others: Columns) -> None:
        """Append the metadata of the documents that follow."""
        self.numbers.extend(others.numbers)
        self.digests += others.digests
        self.checksums += others.checksums

    def add(self, example: Example, checksum: bytes | None = None) -> None:
        """Append a document. checksum: the document's, if already known."""
        self.numbers.extend(
            (
                example.num_tokens,
                example.num_supervised,
                example.cut,
                example.row,
                example.source,
                example.chosen,
            )
        )
        self.digests += example.digest
        self.checksums += checksum or example.checksum


class Examples(Sequence[Example]):
    """N documents, with one array entry for each.

    lengths_N, supervised_N, cuts_N, rows_N, sources_N and chosen_N are int64; digests_N and checksums_N have
    16 bytes each.
    `fetch(i)` returns document i of the store. `places_N` maps this sequence to the store, so that a part of
    a store costs one number per document.
    """

    def __init__(self, fetch: Callable[[int], Example], columns: Columns):
        table = np.frombuffer(columns.numbers, dtype=np.int64).reshape(-1, NUMBERS)
        self._fetch = fetch
        self._table = table
        self.digests_N = np.frombuffer(columns.digests, dtype="V16")
        self.checksums_N = np.frombuffer(columns.checksums, dtype="V16")
        self.places_N = np.arange(len(table))

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Examples:
        """Convert any sequence of documents; they are held in memory."""
        if isinstance(examples, Examples):
            return examples
        columns = Columns()
        for example in examples:
            columns.add(example)
        return cls(examples.__getitem__, columns)

    @property
    def lengths_N(self) -> np.ndarray:
        return self._table[:, 0]

    @property
    def supervised_N(self) -> np.ndarray:
        return self._table[:, 1]

    @property
    def cuts_N(self) -> np.ndarray:
        return self._table[:, 2]

    @property
    def rows_N(self) -> np.ndarray:
        return self._table[:, 3]

    @property
    def sources_N(self) -> np.ndarray:
        return self._table[:, 4]

    @property
    def chosen_N(self) -> np.ndarray:
        return self._table[:, 5]

    @property
    def packed_N(self) -> np.ndarray:
        """Example.packed_tokens of each document."""
        labelled_N = (self.chosen_N == 0) | (self.chosen_N == self.lengths_N)
        return self.lengths_N * (1 + labelled_N)

    def document_lengths(self) -> np.ndarray:
        """Return the number of tokens of every document in a batch; a pair has two."""
        pairs_N = (self.chosen_N > 0) & (self.chosen_N < self.lengths_N)
        first_N = np.where(pairs_N, self.chosen_N, self.lengths_N)
        return np.concatenate([first_N, (self.lengths_N - self.chosen_N)[pairs_N]])

    def made_of(self, places: Iterable[Sequence[int]]) -> np.ndarray:
        """Return a mask [N] of the documents that come from these rows, given as (file number, line)."""
        wanted = {tuple(place) for place in places}
        each = zip(self.sources_N.tolist(), self.rows_N.tolist(), strict=True)
        return np.array([place in wanted for place in each], dtype=bool)

    def part(self, keep_N: np.ndarray) -> Examples:
        """Return the documents where `keep_N` is true, in the same order."""
        part = object.__new__(Examples)
        part._fetch, part._table = self._fetch, self._table[keep_N]
        part.digests_N, part.checksums_N, part.places_N = (
            self.digests_N[keep_N],
            self.checksums_N[keep_N],
            self.places_N[keep_N],
        )
        return part

    def fingerprint(self) -> str:
        """Return a hash of every token and weight, 16 hex digits.

        Data sets with equal fingerprints give equal batches.
        """
        return hashlib.sha256(self.checksums_N.tobytes()).hexdigest()[:16]

    def columns(self) -> dict[str, bytes]:
        """Return the Columns by name, for writing."""
        table = {"numbers": self._table, "digests": self.digests_N, "checksums": self.checksums_N}
        return {name: array_N.tobytes() for name, array_N in table.items()}

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._fetch(int(self.places_N[index]))

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))
