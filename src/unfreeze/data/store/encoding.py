"""Encode a batch of a few hundred rows in one process, in a form that other processes can take over.

The result depends only on the rows and the Spec, not on the process (workers.py).
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
from unfreeze.data.tokens.asked import Asking
from unfreeze.data.tokens.compared import Comparing
from unfreeze.data.tokens.masks import Encoder

BATCH_ROWS, BATCH_BYTES = 256, 2**19
"""Maximum size of a batch: about 50 ms of work."""


class RowBatch(NamedTuple):
    """Consecutive rows of data file number `source`."""

    source: int
    rows: list[tuple[RowPlace, Any]]

    @property
    def num_bytes(self) -> int:
        return sum(place.size for place, _ in self.rows)


@dataclass(frozen=True)
class Spec:
    """Options of encode_files that say how to encode rows."""

    paths: tuple[str, ...]
    columns: tuple[str, ...]
    sequence_length: int
    truncation: Any
    supervise: Any
    turns: Any
    reasoning: Any
    skip: bool
    answers: Any = "taught"
    room: int = 0
    by_columns: bool = False

    def encoder(self, tokenizer: Any) -> Encoder | Comparing | Asking:
        encoder = Encoder(
            tokenizer,
            self.sequence_length,
            self.truncation,
            self.supervise,
            turns=self.turns,
            reasoning=self.reasoning,
        )
        if self.answers == "asked":
            return Asking(encoder, self.room, self.by_columns)
        return encoder if self.answers == "taught" else Comparing(encoder, self.answers)


@dataclass
class EncodedRows:
    """The result of encoding a batch.

    tokens, weights   of its documents, concatenated: int32, float32
    places            of each document: file, row, offset, size, piece; int64
    rows              Account.rows
    error             message and remedy of the row at which encoding stopped
    """

    stats: Stats = field(default_factory=Stats)
    columns: Columns = field(default_factory=Columns)
    tokens: bytearray = field(default_factory=bytearray)
    weights: bytearray = field(default_factory=bytearray)
    places: bytes = b""
    rows: tuple[bytes, bytes] = (b"", b"")
    error: tuple[str, str] | None = None

    def pack(self) -> bytes:
        """Serialise to bytes that `unpack` reads; plain values only."""
        columns = (self.columns.numbers.tobytes(), self.columns.digests, self.columns.checksums)
        return marshal.dumps(
            (self.stats.as_dict(), columns, self.tokens, self.weights, self.places, self.rows, self.error)
        )

    @classmethod
    def unpack(cls, packed: bytes) -> EncodedRows:
        stats, columns, tokens, weights, places, rows, error = marshal.loads(packed)
        return cls(stats_of(stats), Columns.of(*columns), tokens, weights, places, rows, error)


def stats_of(plain: Any) -> Stats:
    """Restore Stats from their plain form."""
    fields: dict[str, Any] = {name: plain[name] for name in Stats.__dataclass_fields__}
    for name in ("listed", "cuts", "repeats"):
        fields[name] = [BadRow(**row) for row in fields[name]]
    for name in ("shapes", "files", "notes"):
        fields[name] = Counter(fields[name])
    return Stats(**fields)


def batches(paths: Sequence[Path], columns: Sequence[str] = ()) -> Iterator[RowBatch]:
    """Yield the rows of all files, in order."""
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
    """Encodes batches in one process."""

    def __init__(self, spec: Spec, encoder: Encoder | Comparing | Asking):
        self.encoder = encoder
        self._paths, self.columns, self._skip = [*map(Path, spec.paths)], spec.columns, spec.skip
        self._answers = spec.answers

    def __call__(self, batch: RowBatch) -> EncodedRows:
        """Encode and count every row; record its lengths and checksums."""
        part, account, places = EncodedRows(), Account(self._paths, skip=self._skip), array("q")
        path = self._paths[batch.source]
        parse = parser(path, self.columns, self._answers)
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
                # once per batch: converting lists to arrays takes a tenth of the encoding time
                tokens_T = np.asarray(example.tokens, dtype=np.int32)
                weights_T = np.asarray(example.weights, dtype=np.float32)
                part.columns.add(example, checksum_of(tokens_T, weights_T, example.chosen))
                part.tokens += tokens_T.tobytes()
                part.weights += weights_T.tobytes()
                places.extend((batch.source, *place, piece))
        part.stats, part.places, part.rows = account.stats, places.tobytes(), account.rows()
        return part
