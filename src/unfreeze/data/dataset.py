"""A data file as examples, and an account of every row of it: used, cut, dropped or bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.units import format_count
from unfreeze.data.masks import Dropped, Supervise, Truncation, encode_row, encode_text
from unfreeze.data.packing import Example
from unfreeze.data.sources import BadRow, Conversation, Row, Text, read_rows
from unfreeze.data.tokenizer import Tokenizer

LISTED = 20
"""So many dropped or bad rows are listed with their reason; all are counted."""


@dataclass
class Stats:
    """rows == used rows + dropped + bad; tokens and supervised are those of the examples, supervised ones after the shift."""

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    truncated: int = 0
    dropped: int = 0
    bad: int = 0
    listed: list[BadRow] = field(default_factory=list)
    shapes: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def supervised_fraction(self) -> float:
        return self.supervised / max(self.tokens, 1)

    def summary(self) -> str:
        """One line: `700 rows (question/answer 700), 81.2 K tokens, 62.1 % supervised, longest 301; 3 truncated, 0 dropped, 0 bad`."""
        shapes = ", ".join(f"{name} {count}" for name, count in self.shapes.most_common())
        line = (
            f"{self.rows} rows ({shapes}), {format_count(self.tokens)} tokens, {100 * self.supervised_fraction:.1f} % supervised, "
            f"longest {self.longest}; {self.truncated} truncated, {self.dropped} dropped, {self.bad} bad"
        )
        return "; ".join([line, *(f"{note} ({count} rows)" for note, count in self.notes.items())])

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON, for an event or --json."""
        return {**asdict(self), "supervised_fraction": self.supervised_fraction, "shapes": dict(self.shapes), "notes": dict(self.notes)}


@dataclass(frozen=True)
class Dataset:
    """Examples in file order, and the account of how they came to be."""

    examples: Sequence[Example]
    stats: Stats


def encode_file(
    path: str | Path,
    tokenizer: Tokenizer,
    sequence_length: int,
    *,
    truncation: Truncation = "tail",
    supervise: Supervise = "assistant",
    on_bad_row: Literal["error", "skip"] = "error",
) -> Dataset:
    """Every row of a file as examples of at most `sequence_length` tokens.

    truncation "split" cuts long texts into several documents (a conversation that is too long is an error then). Rows that keep no supervised token
    are dropped and counted in stats; a bad row raises DataError, or is counted with on_bad_row "skip". Raises DataError if nothing is left.
    """
    if sequence_length < 2:
        raise ConfigError(f"sequence_length is {sequence_length}, at least 2: a token is predicted from the one before it")
    stats = Stats()
    examples: list[Example] = []

    def bad(found: BadRow) -> None:
        stats.rows += 1
        stats.bad += 1
        _list(stats, found)

    for row in read_rows(path, bad if on_bad_row == "skip" else None):
        stats.rows += 1
        stats.shapes[row.shape] += 1
        try:
            encoded = _encode(row, tokenizer, sequence_length, truncation, supervise)
        except Dropped as error:
            stats.dropped += 1
            _list(stats, BadRow(row.row, error.message))
            continue
        except DataError as error:
            if on_bad_row == "error":
                raise DataError(f"{Path(path).name}, {error.message}", next=error.next or "mend the row, or --on-bad-row skip") from None
            stats.bad += 1
            _list(stats, BadRow(row.row, error.message))
            continue
        _count(stats, row, encoded, tokenizer)
        examples += encoded
    if not examples:
        reasons = "; ".join(item.reason for item in stats.listed[:3]) or "the file is empty"
        raise DataError(f"{Path(path).name}: no row left to train on, of {stats.rows}: {reasons}")
    return Dataset(examples, stats)


def _encode(row: Row, tokenizer: Tokenizer, sequence_length: int, truncation: Truncation, supervise: Supervise) -> list[Example]:
    if truncation == "split" and isinstance(row, Text):
        pieces = encode_text(row, tokenizer, sequence_length)
        if not pieces:
            raise Dropped(f"row {row.row}: 0 tokens supervised (the text has a single token)")
        return pieces
    return [encode_row(row, tokenizer, sequence_length, truncation, supervise)]


def _count(stats: Stats, row: Row, encoded: Sequence[Example], tokenizer: Tokenizer) -> None:
    stats.examples += len(encoded)
    stats.tokens += sum(example.num_tokens for example in encoded)
    stats.supervised += sum(example.num_supervised for example in encoded)
    stats.longest = max([stats.longest, *(example.num_tokens for example in encoded)])
    stats.truncated += any(example.cut for example in encoded)
    stats.notes.update(_text_notes(row, tokenizer) if isinstance(row, Text) else _chat_notes(row, encoded[-1], tokenizer))


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


def _list(stats: Stats, found: BadRow) -> None:
    if len(stats.listed) < LISTED:
        stats.listed.append(found)
