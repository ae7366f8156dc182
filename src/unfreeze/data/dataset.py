"""Data files as examples, and an account of every row: used, cut, dropped or bad; duplicates; held out.

N documents. Memory: about 90 bytes a document. Tokens lie on disk (encoded.py); or in memory, 8 bytes each,
if the files together have up to HELD_BYTES. Larger data for which the disk has no room is read once to count
and check it, and each document is read and encoded again when a batch needs it: that takes 40 more bytes a
document instead of the tokens, and the memory of one row. Memory peaks in the search for duplicates: 330
bytes a document were measured (175,000 rows, resident size).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.units import format_count
from unfreeze.data.examples import Columns, Example, Examples
from unfreeze.data.packing.split import content_digest, duplicates
from unfreeze.data.rows.files import Again, read_places, text_bytes
from unfreeze.data.rows.row import BadRow, Place, Row
from unfreeze.data.tokens.forms import Reasoning
from unfreeze.data.tokens.masks import Dropped, Encoded, Encoder, Supervise, Truncation
from unfreeze.data.tokens.tokenizer import Tokenizer
from unfreeze.data.tokens.turns import Turns

ROWS_LISTED = 20
"""The most rows that each list of the account has: dropped or bad rows, truncated ones, duplicates. All are
counted."""
HELD_BYTES = 256 * 2**20
"""Data files with more bytes in total are read on demand. 256 MiB of text are some 70 million tokens, 0.5 GiB
in memory."""

Reading = Literal["memory", "disk", "on demand"]
"""Where a batch finds its documents: in memory, encoded on disk (encoded.py), or in the data files."""


@dataclass
class Stats:
    """The account of the rows: rows == used rows + dropped + bad.

    tokens and supervised are those of the examples, supervised ones after the shift.

    split_rows     rows that became several examples: one per turn of the assistant, or pieces of a long text.
                   `examples_dropped` of their examples had no supervised token at this length: left out
    truncated      rows that lost `tokens_cut` tokens together; the first are in `cuts`
    duplicates     rows whose content an earlier row has (`repeats` lists the first, each with that earlier
                   row); they are used all the same
    efficiency     share of the token budget that packing fills in the first epoch; set where batches are
                   made, as `packing` is
    held_out       documents set aside for validation; they are in rows, examples and tokens
    """

    rows: int = 0
    examples: int = 0
    split_rows: int = 0
    examples_dropped: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    truncated: int = 0
    tokens_cut: int = 0
    dropped: int = 0
    bad: int = 0
    duplicates: int = 0
    held_out: int = 0
    packing: str = ""
    efficiency: float | None = None
    reading: Reading = "memory"
    listed: list[BadRow] = field(default_factory=list)
    cuts: list[BadRow] = field(default_factory=list)
    repeats: list[BadRow] = field(default_factory=list)
    shapes: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def supervised_fraction(self) -> float:
        return self.supervised / max(self.tokens, 1)

    def summary(self) -> str:
        """Put the account into one line.

        `700 rows (question/answer 700), 81.2 K tokens, 62.1 % supervised, longest 301; 3 truncated (96 tokens
        cut), 0 dropped, …`
        """
        shapes = ", ".join(f"{name} {count}" for name, count in self.shapes.most_common())
        made = f", {self.examples} examples" if self.split_rows else ""
        cut = f" ({self.tokens_cut} tokens cut)" if self.truncated else ""
        also = f" (and {self.examples_dropped} examples)" if self.examples_dropped else ""
        line = (
            f"{self.rows} rows ({shapes}){made}, {format_count(self.tokens)} tokens,"
            f" {100 * self.supervised_fraction:.1f} % supervised, longest {self.longest}; {self.truncated}"
            f" truncated{cut}, {self.dropped} dropped{also}, {self.bad} bad, {self.duplicates} duplicates"
        )
        more = [
            (
                f"packing {self.packing} fills {100 * self.efficiency:.1f} % of a step"
                if self.efficiency is not None
                else ""
            ),
            f"{self.held_out} documents held out for validation" if self.held_out else "",
            "files read on demand" if self.reading == "on demand" else "",
            *(f"{note} ({count} row{'' if count == 1 else 's'})" for note, count in self.notes.items()),
        ]
        return "; ".join([line, *filter(None, more)])

    def as_dict(self) -> dict[str, object]:
        """The same as plain JSON, for an event or --json."""
        counters = {"shapes": dict(self.shapes), "files": dict(self.files), "notes": dict(self.notes)}
        return {**asdict(self), "supervised_fraction": self.supervised_fraction, **counters}


@dataclass(frozen=True)
class Dataset:
    """Examples in the order of the files, and the account of how they came to be.

    `validation`: documents held out, none if not asked for.
    """

    examples: Examples
    stats: Stats
    validation: Examples | None = None

    def leaked(self) -> int:
        """Validation documents whose content is also trained on.

        0 where the split is by content; a validation file can share rows with the data.
        """
        held_out = [] if self.validation is None else self.validation.digests_N.tolist()
        trained = set(held_out).intersection(self.examples.digests_N.tolist())
        return sum(digest in trained for digest in held_out)


def encode_file(path: str | Path, tokenizer: Tokenizer, sequence_length: int, **options: Any) -> Dataset:
    """encode_files of one file."""
    return encode_files([path], tokenizer, sequence_length, **options)


def encode_files(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    sequence_length: int,
    *,
    truncation: Truncation = "tail",
    supervise: Supervise = "assistant",
    turns: Turns = "auto",
    reasoning: Reasoning = "auto",
    on_bad_row: Literal["error", "skip"] = "error",
    columns: Sequence[str] = (),
    held_bytes: int = HELD_BYTES,
    store: Store | None = None,
) -> Dataset:
    """Every row of the files, one file after the other, as examples of at most `sequence_length` tokens.

    How a row becomes examples: see Encoder. Rows that keep no supervised token are dropped and counted in
    stats; a bad row raises DataError, or is counted with on_bad_row "skip".
    columns: the files' own names of a row's fields (rows/columns.py).
    store: where tokens are kept. None: in memory, or nowhere if the files have more than `held_bytes`
    together: they are then read on demand. The result is the same.
    Raises DataError if nothing is left.
    """
    if sequence_length < 2:
        raise ConfigError(
            f"sequence_length is {sequence_length}, at least 2: a token is predicted from the one before it"
        )
    paths = [Path(path) for path in paths]
    encoder = Encoder(tokenizer, sequence_length, truncation, supervise, turns=turns, reasoning=reasoning)
    if store is None:
        on_demand = sum(text_bytes(path) for path in paths if path.is_file()) > held_bytes
        store = OnDemand(paths, encoder, columns) if on_demand else Held()
    account = Account(paths, skip=on_bad_row == "skip")
    # every row once: encoded, counted, its lengths and checksum noted (account.columns)
    for source, path in enumerate(paths):
        for place, row in read_places(
            path, partial(account.unreadable, source) if on_bad_row == "skip" else None, columns
        ):
            encoded = account.encode(row, source, encoder)
            store.add(place, encoded)
            for example in encoded:
                account.columns.add(example)
    examples = Examples(store.fetch, account.columns)
    stats = account.finish(examples)
    stats.reading = store.reading
    # nothing left: say why the first rows were dropped
    if not len(examples):
        reasons = "; ".join(item.reason for item in stats.listed[:3]) or "the file is empty"
        names = ", ".join(map(str, paths))
        raise DataError(
            f"{names}: no row left to train on, of {stats.rows}: {reasons}",
            next=f"look at the rows: unfreeze data show {paths[0]} --model MODEL",
        )
    return Dataset(examples, stats)


class Store(Protocol):
    """Where the tokens of documents are kept."""

    reading: Reading

    def add(self, place: Place, encoded: Sequence[Example]) -> None:
        """Keep the documents of the row at `place`."""
        ...

    def fetch(self, index: int) -> Example:
        """Document `index`, counted in the order of `add`."""
        ...


class Held:
    """Documents in memory: 8 bytes a token (int32, float32)."""

    reading: Reading = "memory"

    def __init__(self) -> None:
        self._examples: list[Example] = []

    def add(self, place: Place, encoded: Sequence[Example]) -> None:
        self._examples += [
            replace(e, tokens=array("i", e.tokens), weights=array("f", e.weights)) for e in encoded
        ]

    def fetch(self, index: int) -> Example:
        return self._examples[index]


class OnDemand:
    """Documents as places in their files (40 bytes each); read and encoded again at every visit."""

    reading: Reading = "on demand"

    def __init__(self, paths: Sequence[Path], encoder: Encoder, columns: Sequence[str] = ()):
        self._paths, self._encoder, self._columns = paths, encoder, columns
        self._places = array("q")
        self._checksums = bytearray()
        self._files: dict[int, Again] = {}

    def add(self, place: Place, encoded: Sequence[Example]) -> None:
        for piece, example in enumerate(encoded):
            self._places.extend((example.source, *place, piece))
            self._checksums += example.checksum

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
                self._files[source] = Again(path, self._columns)
            pieces = self._encoder(self._files[source](Place(row, offset, size))).examples
        except DataError:
            raise changed from None
        if piece >= len(pieces) or pieces[piece].checksum != self._checksums[16 * index : 16 * index + 16]:
            raise changed
        return replace(pieces[piece], source=source)


class Account:
    """Encodes rows and counts each one: used, cut, dropped or bad."""

    def __init__(self, paths: Sequence[Path], *, skip: bool):
        self.stats, self.columns = Stats(), Columns()
        self._paths, self._skip = paths, skip
        self._row_digests, self._row_places = bytearray(), array("q")

    def unreadable(self, source: int, found: BadRow) -> None:
        """A row that is not JSON, or of no known shape."""
        self.stats.rows += 1
        self.stats.bad += 1
        self._list(self.stats.listed, source, found)

    def encode(self, row: Row, source: int, encoder: Callable[[Row], Encoded]) -> list[Example]:
        """The row's examples, counted; none where it is dropped or, with on_bad_row "skip", bad."""
        stats = self.stats
        stats.rows += 1
        stats.shapes[row.shape] += 1
        stats.files[self._paths[source].name] += 1
        try:
            encoded = encoder(row)
        except Dropped as error:
            stats.dropped += 1
            self._list(stats.listed, source, BadRow(row.row, error.message))
            return []
        except DataError as error:
            if not self._skip:
                name = self._paths[source].name
                raise DataError(
                    f"{name}, {error.message}", next=error.next or "mend the row, or --on-bad-row skip"
                ) from None
            stats.bad += 1
            self._list(stats.listed, source, BadRow(row.row, error.message))
            return []
        digest = content_digest(row)
        self._row_digests += digest
        self._row_places.extend((source, row.row))
        self._count(row, source, encoded)
        return [replace(example, source=source, digest=digest) for example in encoded.examples]

    def _count(self, row: Row, source: int, encoded: Encoded) -> None:
        stats, cuts = self.stats, [example for example in encoded.examples if example.cut]
        stats.notes.update(encoded.notes)
        stats.split_rows += len(encoded.examples) + len(encoded.dropped) > 1
        stats.examples_dropped += len(encoded.dropped)
        for reason in encoded.dropped:
            self._list(
                stats.listed,
                source,
                BadRow(
                    row.row,
                    f"{reason} (one of {len(encoded.examples) + len(encoded.dropped)} examples of the row)",
                ),
            )
        if cuts:
            stats.truncated += 1
            stats.tokens_cut += sum(example.cut for example in cuts)
            kept, cut = cuts[0].num_tokens, cuts[0].cut
            self._list(
                stats.cuts,
                source,
                BadRow(row.row, f"row {row.row}: {kept} of {kept + cut} tokens kept, {cut} cut"),
            )

    def finish(self, examples: Examples) -> Stats:
        """Complete the account: the sums over the examples, and the duplicates."""
        stats = self.stats
        stats.examples = len(examples)
        stats.tokens, stats.supervised = int(examples.lengths_N.sum()), int(examples.supervised_N.sum())
        stats.longest = int(examples.lengths_N.max(initial=0))
        places = np.frombuffer(self._row_places, dtype=np.int64).reshape(-1, 2)
        repeated = duplicates(np.frombuffer(self._row_digests, dtype="V16"))
        stats.duplicates = len(repeated)
        for place, first in repeated[:ROWS_LISTED]:
            (source, row), (first_source, first_row) = places[place].tolist(), places[first].tolist()
            where = f"row {first_row}" + (
                f" of {self._paths[first_source].name}" if first_source != source else ""
            )
            self._list(stats.repeats, source, BadRow(row, f"row {row}: says the same as {where}"))
        return stats

    def _list(self, listed: list[BadRow], source: int, found: BadRow) -> None:
        if len(listed) < ROWS_LISTED:
            listed.append(replace(found, file=self._paths[source].name if len(self._paths) > 1 else ""))
