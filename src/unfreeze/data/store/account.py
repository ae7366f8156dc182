"""Statistics of the rows of data files: used, cut, dropped or bad, and duplicates.

Nothing here needs torch, because each encoding process (workers.py) keeps its own statistics.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from unfreeze.core.errors import DataError
from unfreeze.core.units import format_count, plural
from unfreeze.data.rows.row import BadRow, Judged, Row, content_digest
from unfreeze.data.store.examples import Example, Examples
from unfreeze.data.tokens.masks import Dropped, Encoded

ROWS_LISTED = 20
"""Maximum length of each list in the statistics: dropped or bad rows, truncated ones, duplicates. The
counters include all."""
Reading = Literal["memory", "disk", "on demand"]
"""Source of a batch's documents: memory, encoded on disk (encoded.py), or the data files."""


@dataclass
class Stats:
    """Statistics of the rows: rows == used rows + dropped + bad.

    tokens and supervised are sums over the examples; supervised counts after the shift.

        split_rows     rows that became several examples: one per assistant turn, or pieces of a long text.
                       `examples_dropped` of these had no supervised token at this length and were left out
        truncated      rows that lost tokens to truncation, `tokens_cut` in total; the first are in `cuts`
        duplicates     rows whose content equals an earlier row's (`repeats` lists the first, each with that
                       earlier row); they are still used
        efficiency     share of the token budget that packing fills in the first epoch; set when batches are
                       created, as is `packing`
        held_out       documents held out for validation; included in rows, examples and tokens
        room           of rows that are asked: tokens of each example that wait for an answer; else 0. Equal
                       prompts with other columns are then no duplicates, and packing says nothing
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
    room: int = 0
    packing: str = ""
    efficiency: float | None = None
    reading: Reading = "memory"
    listed: list[BadRow] = field(default_factory=list[BadRow])
    cuts: list[BadRow] = field(default_factory=list[BadRow])
    repeats: list[BadRow] = field(default_factory=list[BadRow])
    shapes: Counter[str] = field(default_factory=Counter[str])
    files: Counter[str] = field(default_factory=Counter[str])
    notes: Counter[str] = field(default_factory=Counter[str])

    @property
    def supervised_fraction(self) -> float:
        return self.supervised / max(self.tokens, 1)

    def summary(self) -> str:
        """Return the statistics as one line.

        `700 rows (question/answer 700), 81.2 K tokens, 62.1 % supervised, longest 301; 3 truncated (96 tokens
        cut), 0 dropped, …`
        """
        shapes = ", ".join(f"{name} {count:,}" for name, count in self.shapes.most_common())
        examples = f", {plural(self.examples, 'example')}" if self.split_rows else ""
        cut = f" ({plural(self.tokens_cut, 'token')} cut)" if self.truncated else ""
        also = f" (and {plural(self.examples_dropped, 'example')})" if self.examples_dropped else ""
        taught = f"{100 * self.supervised_fraction:.1f} % supervised, longest {self.longest:,}"
        tokens, repeated = self.tokens, f", {plural(self.duplicates, 'duplicate')}"
        if self.room:
            tokens, repeated = self.tokens - self.room * self.examples, ""
            taught = f"room for {self.room:,} more in each, longest {self.longest - self.room:,}"
        line = (
            f"{plural(self.rows, 'row')} ({shapes}){examples}, {format_count(tokens)} tokens, {taught};"
            f" {self.truncated:,} truncated{cut}, {self.dropped:,} dropped{also}, {self.bad:,} bad{repeated}"
        )
        more = [
            (f"batches are {100 * self.efficiency:.1f} % full" if self.efficiency is not None else ""),
            f"{plural(self.held_out, 'document')} held out for validation" if self.held_out else "",
            "files read on demand" if self.reading == "on demand" else "",
            *(f"{note} ({plural(count, 'row')})" for note, count in self.notes.items()),
        ]
        return "; ".join([line, *filter(None, more)])

    def as_dict(self) -> dict[str, object]:
        """Return the statistics as plain JSON, for an event or --json."""
        counters = {"shapes": dict(self.shapes), "files": dict(self.files), "notes": dict(self.notes)}
        return {**asdict(self), "supervised_fraction": self.supervised_fraction, **counters}


_SUMS = ("rows", "split_rows", "examples_dropped", "truncated", "tokens_cut", "dropped", "bad")
"""Fields of Stats that are summed over rows."""
_LISTS = ("listed", "cuts")
_COUNTS = ("shapes", "files", "notes")


class Account:
    """Encodes rows and counts each one as used, cut, dropped or bad."""

    def __init__(self, paths: Sequence[Path], *, skip: bool):
        self.stats = Stats()
        self._paths, self._skip = paths, skip
        self._row_digests, self._row_places = bytearray(), array("q")

    def unreadable(self, source: int, bad_row: BadRow) -> None:
        """Count a row that is not JSON or has no known shape."""
        self.stats.rows += 1
        self.stats.bad += 1
        self._list(self.stats.listed, source, bad_row)

    def encode(self, row: Row | Judged, source: int, encoder: Callable[[Any], Encoded]) -> list[Example]:
        """Encode a row and count it; return no examples if it is dropped or (with on_bad_row "skip") bad."""
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
                    f"{name}, {error.message}",
                    next=error.next or "correct the row, or --data.on-bad-row skip",
                ) from None
            stats.bad += 1
            self._list(stats.listed, source, BadRow(row.row, error.message))
            return []
        digest = encoded.digest or content_digest(row)
        self._row_digests += digest
        self._row_places.extend((source, row.row))
        self._count(row, source, encoded)
        return [
            Example(example.tokens, example.weights, example.row, example.cut, source, digest, example.chosen)
            for example in encoded.examples
        ]

    def _count(self, row: Row | Judged, source: int, encoded: Encoded) -> None:
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
            num_kept, cut = cuts[0].num_tokens, cuts[0].cut
            self._list(
                stats.cuts,
                source,
                BadRow(row.row, f"row {row.row}: {num_kept} of {num_kept + cut} tokens kept, {cut} cut"),
            )

    def so_far(self, examples: Examples) -> Stats:
        """Return the statistics so far, without duplicates; `examples` are those of the counted rows."""
        return replace(
            self.stats,
            examples=len(examples),
            tokens=int(examples.lengths_N.sum()),
            supervised=int(examples.supervised_N.sum()),
            longest=int(examples.lengths_N.max(initial=0)),
        )

    def finish(self, examples: Examples) -> Stats:
        """Complete the statistics: sums over the examples, and duplicates in file order."""
        self.stats = stats = self.so_far(examples)
        places = np.frombuffer(self._row_places, dtype=np.int64).reshape(-1, 2)
        order = np.lexsort((places[:, 1], places[:, 0]))
        places = places[order]
        repeated = duplicates(np.frombuffer(self._row_digests, dtype="V16")[order])
        stats.duplicates = len(repeated)
        for place, first in repeated[:ROWS_LISTED]:
            source, row = cast("tuple[int, int]", places[place].tolist())
            first_source, first_row = cast("tuple[int, int]", places[first].tolist())
            where = f"row {first_row}" + (
                f" of {self._paths[first_source].name}" if first_source != source else ""
            )
            self._list(stats.repeats, source, BadRow(row, f"row {row} repeats {where}"))
        return stats

    def merge(self, stats: Stats, row_digests: bytes, row_places: bytes) -> None:
        """Add the statistics of the rows that follow."""
        own = self.stats
        for name in _SUMS:
            setattr(own, name, getattr(own, name) + getattr(stats, name))
        for name in _LISTS:
            rows: list[BadRow] = getattr(own, name)
            rows += getattr(stats, name)[: ROWS_LISTED - len(rows)]
        for name in _COUNTS:
            getattr(own, name).update(getattr(stats, name))
        self._row_digests += row_digests
        self._row_places.frombytes(row_places)

    def rows(self) -> tuple[bytes, bytes]:
        """Return the data for finding duplicates: for each used row its 16-byte digest, and (file, row)."""
        return bytes(self._row_digests), self._row_places.tobytes()

    def _list(self, listed: list[BadRow], source: int, bad_row: BadRow) -> None:
        if len(listed) < ROWS_LISTED:
            listed.append(replace(bad_row, file=self._paths[source].name if len(self._paths) > 1 else ""))


def duplicates(digests_N: np.ndarray) -> list[tuple[int, int]]:
    """Return (index, index of the first equal digest) for every repeated digest, in order.

    With 16 bytes per digest, a chance collision can be ignored.
    """
    halves_N2 = np.frombuffer(digests_N.tobytes(), dtype=[("a", "<u8"), ("b", "<u8")])
    _, first, inverse = np.unique(halves_N2, return_index=True, return_inverse=True)
    original_N = first[inverse]
    return [
        (int(place), int(original_N[place]))
        for place in np.flatnonzero(original_N != np.arange(len(original_N)))
    ]
