"""Rows in batches: what one process makes of a few hundred of them, in a form that another can take over.

The result is a function of the rows and of the Spec, whichever process makes it: workers.py.
"""

from __future__ import annotations

import marshal
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unfreeze.core.errors import DataError
from unfreeze.data.rows.files import parser, raw_rows, refused
from unfreeze.data.rows.row import BadRow, RowPlace
from unfreeze.data.store.account import Account, Stats
from unfreeze.data.store.examples import Columns, checksum_of
from unfreeze.data.tokens.compared import Comparing
from unfreeze.data.tokens.masks import Encoder

BATCH_ROWS, BATCH_BYTES = 256, 2**19
"""Of a batch, at most: some 50 ms of work."""


class RowBatch(NamedTuple):
    """Rows that follow one another in data file number `source`."""

    source: int
    rows: list[tuple[RowPlace, Any]]

    @property
    def num_bytes(self) -> int:
        return sum(place.size for place, _ in self.rows)


@dataclass(frozen=True)
class Spec:
    """How rows are encoded: options of encode_files."""

    paths: tuple[str, ...]
    columns: tuple[str, ...]
    sequence_length: int
    truncation: Any
    supervise: Any
    turns: Any
    reasoning: Any
    skip: bool
    answers: Any = "taught"

    def encoder(self, tokenizer: Any) -> Encoder | Comparing:
        encoder = Encoder(
            tokenizer,
            self.sequence_length,
            self.truncation,
            self.supervise,
            turns=self.turns,
            reasoning=self.reasoning,
        )
        return encoder if self.answers == "taught" else Comparing(encoder, self.answers)


@dataclass
class EncodedRows:
    """What became of a batch.

    tokens, weights   of its documents, one after the other: int32, float32
    places            of each document: file, row, offset, size, piece; int64
    rows              Account.rows
    error             message and remedy of the row at which the batch was given up
    """

    stats: Stats = field(default_factory=Stats)
    columns: Columns = field(default_factory=Columns)
    tokens: bytearray = field(default_factory=bytearray)
    weights: bytearray = field(default_factory=bytearray)
    places: bytes = b""
    rows: tuple[bytes, bytes] = (b"", b"")
    error: tuple[str, str] | None = None

    def pack(self) -> bytes:
        """As bytes that `unpack` reads: plain values only."""
        columns = (self.columns.numbers.tobytes(), self.columns.digests, self.columns.checksums)
        return marshal.dumps(
            (self.stats.as_dict(), columns, self.tokens, self.weights, self.places, self.rows, self.error)
        )

    @classmethod
    def unpack(cls, packed: bytes) -> EncodedRows:
        stats, columns, tokens, weights, places, rows, error = marshal.loads(packed)
        return cls(stats_of(stats), Columns.of(*columns), tokens, weights, places, rows, error)


def stats_of(plain: Any) -> Stats:
    """Stats from their plain form."""
    given: dict[str, Any] = {name: plain[name] for name in Stats.__dataclass_fields__}
    for name in ("listed", "cuts", "repeats"):
        given[name] = [BadRow(**row) for row in given[name]]
    for name in ("shapes", "files", "notes"):
        given[name] = Counter(given[name])
    return Stats(**given)


def batches(paths: Sequence[Path], columns: Sequence[str] = ()) -> Iterator[RowBatch]:
    """The rows of all files, in order."""
    for source, path in enumerate(paths):
        batch = RowBatch(source, [])
        size = 0
        for place, raw in raw_rows(path, columns):
            batch.rows.append((place, raw))
            size += place.size
            if len(batch.rows) >= BATCH_ROWS or size >= BATCH_BYTES:
                yield batch
                batch, size = RowBatch(source, []), 0
        if batch.rows:
            yield batch


class Coder:
    """Encodes batches, in one process."""

    def __init__(self, spec: Spec, encoder: Encoder | Comparing):
        self.encoder = encoder
        self._paths, self._columns, self._skip = [*map(Path, spec.paths)], spec.columns, spec.skip
        self._answers = spec.answers

    def __call__(self, batch: RowBatch) -> EncodedRows:
        """Every row encoded, counted, its lengths and checksums noted."""
        part, account, places = EncodedRows(), Account(self._paths, skip=self._skip), array("q")
        path = self._paths[batch.source]
        parse = parser(path, self._columns, self._answers)
        for place, raw in batch.rows:
            try:
                try:
                    row = parse(raw, place)
                except DataError as error:
                    if not self._skip:
                        raise refused(path, error) from None
                    account.unreadable(batch.source, BadRow(place.row, error.message))
                    continue
                examples = account.encode(row, batch.source, self.encoder)
            except DataError as error:
                part.error = (error.message, error.next)
                break
            for piece, example in enumerate(examples):
                # once: making arrays of lists is a tenth of encoding a row
                tokens_T = np.asarray(example.tokens, dtype=np.int32)
                weights_T = np.asarray(example.weights, dtype=np.float32)
                part.columns.add(example, checksum_of(tokens_T, weights_T, example.chosen))
                part.tokens += tokens_T.tobytes()
                part.weights += weights_T.tobytes()
                places.extend((batch.source, *place, piece))
        part.stats, part.places, part.rows = account.stats, places.tobytes(), account.rows()
        return part
