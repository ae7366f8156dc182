"""Data files as examples, and an account of every row: used, cut, dropped or bad; what stands twice; what is held out.

N documents. Memory: about 90 bytes a document; and the tokens, 8 bytes each, of files up to HELD_BYTES together. Larger data is gone through
once to count and check it, and each document is read and encoded again when a batch wants it: then 40 bytes more a document, and one row.
At the peak, while duplicates are looked for, 330 bytes a document were measured (175,000 rows, resident size).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.units import format_count
from unfreeze.data.examples import Columns, Example, Examples
from unfreeze.data.masks import Dropped, Supervise, Truncation, check_mask, encode_row, encode_text
from unfreeze.data.sources import BadRow, Conversation, Place, Row, Text, read_at, read_places
from unfreeze.data.split import content_digest, duplicates
from unfreeze.data.tokenizer import Tokenizer

LISTED = 20
"""So many dropped or bad rows are listed with their reason, so many truncated ones and so many duplicates; all are counted."""
HELD_BYTES = 256 * 2**20
"""Data files of more bytes together are read on demand. 256 MiB of text are some 70 million tokens, 0.5 GiB in memory."""


@dataclass
class Stats:
    """rows == used rows + dropped + bad; tokens and supervised are those of the examples, supervised ones after the shift.

    truncated      rows that lost `tokens_cut` tokens together; the first are in `cuts`
    duplicates     rows whose content stood before, as rows (`repeats` has the first with their original); they are used all the same
    efficiency     share of the token budget that packing fills in the first epoch; set where batches are made, as `packing` is
    held_out       documents set aside for validation; they are in rows, examples and tokens
    """

    rows: int = 0
    examples: int = 0
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
    reading: Literal["memory", "on demand"] = "memory"
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
        """One line: `700 rows (question/answer 700), 81.2 K tokens, 62.1 % supervised, longest 301; 3 truncated (96 tokens cut), 0 dropped, …`."""
        shapes = ", ".join(f"{name} {count}" for name, count in self.shapes.most_common())
        line = (
            f"{self.rows} rows ({shapes}), {format_count(self.tokens)} tokens, {100 * self.supervised_fraction:.1f} % supervised, "
            f"longest {self.longest}; {self.truncated} truncated{f' ({self.tokens_cut} tokens cut)' if self.truncated else ''}, "
            f"{self.dropped} dropped, {self.bad} bad, {self.duplicates} duplicates"
        )
        more = [
            f"packing {self.packing} fills {100 * self.efficiency:.1f} % of a step" if self.efficiency is not None else "",
            f"{self.held_out} documents held out for validation" if self.held_out else "",
            "files read on demand" if self.reading == "on demand" else "",
            *(f"{note} ({count} rows)" for note, count in self.notes.items()),
        ]
        return "; ".join([line, *filter(None, more)])

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON, for an event or --json."""
        counters = {"shapes": dict(self.shapes), "files": dict(self.files), "notes": dict(self.notes)}
        return {**asdict(self), "supervised_fraction": self.supervised_fraction, **counters}


@dataclass(frozen=True)
class Dataset:
    """Examples in the order of the files, and the account of how they came to be. `validation`: documents held out, none if not asked for."""

    examples: Examples
    stats: Stats
    validation: Examples | None = None

    def leaked(self) -> int:
        """Validation documents whose content is also trained on. 0 where the split is by content; a validation file can hold some."""
        held_out = [] if self.validation is None else self.validation.digests_N.tolist()
        trained = set(held_out).intersection(self.examples.digests_N.tolist())
        return sum(digest in trained for digest in held_out)


@dataclass(frozen=True)
class Encoder:
    """How a row becomes examples: the same when it is counted and when it is read again."""

    tokenizer: Tokenizer
    sequence_length: int
    truncation: Truncation
    supervise: Supervise

    def __call__(self, row: Row, source: int) -> list[Example]:
        """Raises Dropped for a row of no use, DataError for a bad one; both name the row."""
        if self.truncation == "split" and isinstance(row, Text):
            encoded = encode_text(row, self.tokenizer, self.sequence_length)
            if not encoded:
                raise Dropped(f"row {row.row}: 0 tokens supervised (the text has a single token)")
        else:
            encoded = [encode_row(row, self.tokenizer, self.sequence_length, self.truncation, self.supervise)]
        digest = content_digest(row)
        return [replace(example, source=source, digest=digest) for example in encoded]


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
    on_bad_row: Literal["error", "skip"] = "error",
    held_bytes: int = HELD_BYTES,
) -> Dataset:
    """Every row of the files, one file after the other, as examples of at most `sequence_length` tokens.

    truncation "split" cuts long texts into several documents (a conversation that is too long is an error then). Rows that keep no supervised
    token are dropped and counted in stats; a bad row raises DataError, or is counted with on_bad_row "skip". Files of more than `held_bytes`
    together are read on demand; the result is the same.
    Raises DataError if nothing is left, and where the template's mask covers what the user says (FAILURES N4).
    """
    if sequence_length < 2:
        raise ConfigError(f"sequence_length is {sequence_length}, at least 2: a token is predicted from the one before it")
    paths = [Path(path) for path in paths]
    encoder = Encoder(tokenizer, sequence_length, truncation, supervise)
    on_demand = sum(path.stat().st_size for path in paths if path.is_file()) > held_bytes
    store: Held | OnDemand = OnDemand(paths, encoder) if on_demand else Held()
    account = Account(paths, tokenizer, skip=on_bad_row == "skip")
    for source, path in enumerate(paths):
        for place, row in read_places(path, partial(account.unreadable, source) if on_bad_row == "skip" else None):
            if supervise == "assistant" and isinstance(row, Conversation) and not account.conversations:
                check_mask(tokenizer)  # texts need no template, so a wrong one is no fault of theirs
            encoded = account.encode(row, source, encoder)
            store.add(place, encoded)
            for example in encoded:
                account.columns.add(example)
    examples = Examples(store.fetch, account.columns)
    stats = account.finish(examples)
    stats.reading = "on demand" if on_demand else "memory"
    if not len(examples):
        reasons = "; ".join(item.reason for item in stats.listed[:3]) or "the file is empty"
        names = ", ".join(map(str, paths))
        raise DataError(
            f"{names}: no row left to train on, of {stats.rows}: {reasons}", next=f"look at the rows: unfreeze data show {paths[0]} --model MODEL"
        )
    return Dataset(examples, stats)


class Held:
    """Documents in memory: 8 bytes a token (int32, float32)."""

    def __init__(self) -> None:
        self._examples: list[Example] = []

    def add(self, place: Place, encoded: Sequence[Example]) -> None:
        self._examples += [replace(e, tokens=array("i", e.tokens), weights=array("f", e.weights)) for e in encoded]

    def fetch(self, index: int) -> Example:
        return self._examples[index]


class OnDemand:
    """Documents as places in their files (40 bytes each); read and encoded again at every visit."""

    def __init__(self, paths: Sequence[Path], encoder: Encoder):
        self._paths, self._encoder = paths, encoder
        self._places = array("q")
        self._checksums = bytearray()
        self._files: dict[int, IO[bytes]] = {}

    def add(self, place: Place, encoded: Sequence[Example]) -> None:
        for piece, example in enumerate(encoded):
            self._places.extend((example.source, *place, piece))
            self._checksums += example.checksum

    def fetch(self, index: int) -> Example:
        """Raises DataError where the file is no longer what was counted: the order of a run hangs on it."""
        source, row, offset, size, piece = self._places[5 * index : 5 * index + 5]
        path = self._paths[source]
        if source not in self._files:
            self._files[source] = path.open("rb")
        changed = DataError(f"{path.name}, row {row}: the file changed while it was trained on", next="start again with a file that stays as it is")
        try:
            pieces = self._encoder(read_at(self._files[source], path, Place(row, offset, size)), source)
        except DataError:
            raise changed from None
        if piece >= len(pieces) or pieces[piece].checksum != self._checksums[16 * index : 16 * index + 16]:
            raise changed
        return pieces[piece]


class Account:
    """Counts every row as it passes: nothing vanishes."""

    def __init__(self, paths: Sequence[Path], tokenizer: Tokenizer, *, skip: bool):
        self.stats, self.columns = Stats(), Columns()
        self._paths, self._tokenizer, self._skip = paths, tokenizer, skip
        self._row_digests, self._row_places = bytearray(), array("q")
        self.conversations = 0

    def unreadable(self, source: int, found: BadRow) -> None:
        """A row that is not JSON, or of no known shape."""
        self.stats.rows += 1
        self.stats.bad += 1
        self._list(self.stats.listed, source, found)

    def encode(self, row: Row, source: int, encoder: Callable[[Row, int], list[Example]]) -> list[Example]:
        """The row's examples, counted; none where it is dropped or, with on_bad_row "skip", bad."""
        stats = self.stats
        stats.rows += 1
        stats.shapes[row.shape] += 1
        self.conversations += isinstance(row, Conversation)
        stats.files[self._paths[source].name] += 1
        try:
            encoded = encoder(row, source)
        except Dropped as error:
            stats.dropped += 1
            self._list(stats.listed, source, BadRow(row.row, error.message))
            return []
        except DataError as error:
            if not self._skip:
                name = self._paths[source].name
                raise DataError(f"{name}, {error.message}", next=error.next or "mend the row, or --on-bad-row skip") from None
            stats.bad += 1
            self._list(stats.listed, source, BadRow(row.row, error.message))
            return []
        self._row_digests += encoded[0].digest
        self._row_places.extend((source, row.row))
        self._count(row, source, encoded)
        return encoded

    def _count(self, row: Row, source: int, encoded: Sequence[Example]) -> None:
        stats, cut = self.stats, sum(example.cut for example in encoded)
        stats.notes.update(_text_notes(row, self._tokenizer) if isinstance(row, Text) else _chat_notes(row, encoded[-1], self._tokenizer))
        if cut:
            stats.truncated += 1
            stats.tokens_cut += cut
            kept = encoded[0].num_tokens
            self._list(stats.cuts, source, BadRow(row.row, f"row {row.row}: {kept} of {kept + cut} tokens kept, {cut} cut"))

    def finish(self, examples: Examples) -> Stats:
        """Sums over the examples, and the rows that stood before."""
        stats = self.stats
        stats.examples = len(examples)
        stats.tokens, stats.supervised = int(examples.lengths_N.sum()), int(examples.supervised_N.sum())
        stats.longest = int(examples.lengths_N.max(initial=0))
        places = np.frombuffer(self._row_places, dtype=np.int64).reshape(-1, 2)
        again = duplicates(np.frombuffer(self._row_digests, dtype="V16"))
        stats.duplicates = len(again)
        for place, first in again[:LISTED]:
            (source, row), (first_source, first_row) = places[place].tolist(), places[first].tolist()
            where = f"row {first_row}" + (f" of {self._paths[first_source].name}" if first_source != source else "")
            self._list(stats.repeats, source, BadRow(row, f"row {row}: says the same as {where}"))
        return stats

    def _list(self, listed: list[BadRow], source: int, found: BadRow) -> None:
        if len(listed) < LISTED:
            listed.append(replace(found, file=self._paths[source].name if len(self._paths) > 1 else ""))


def _text_notes(row: Text, tokenizer: Tokenizer) -> list[str]:
    found = next((text for text in tokenizer.special_texts if text and text in row.text), None)
    return [f"special-token text ({found}) read as plain text"] if found else []


def _chat_notes(row: Conversation, example: Example, tokenizer: Tokenizer) -> list[str]:
    """What a user would want to know before training on this row."""
    notes = [] if tokenizer.template else ["no chat template in the checkpoint: the plain one is used"]
    for name in ("reasoning_content", "tool_calls"):
        if any(message.get(name) for message in row.messages) and name not in tokenizer.chat.source:
            notes.append(f"{name} is not part of this chat template and is left out")
    last = max(i for i, weight in enumerate(example.weights) if weight)
    if not example.cut and example.tokens[last] not in tokenizer.eos_ids:
        notes.append("the answer does not close with an end token: the end is not learned")
    return notes
