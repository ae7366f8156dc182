"""Encode data files as examples, with statistics: rows used, cut, dropped or bad, duplicates, rows held out.

N documents take about 90 bytes each in memory. Tokens are on disk (encoded.py), or in memory at 8 bytes each
if the files total at most HELD_BYTES. Larger data that does not fit on the disk is read once to count and
check it; each document is then read and encoded again when a batch needs it. That takes 40 more bytes per
document instead of the tokens, plus the memory of one row. Memory peaks during the search for duplicates at
330 bytes per document (measured with 175,000 rows, resident size).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.rows.files import read_places, text_bytes
from unfreeze.data.rows.row import Answers
from unfreeze.data.store.account import Account, Reading, Stats
from unfreeze.data.store.documents import Held, OnDemand, Store
from unfreeze.data.store.encoding import Coder, Spec, batches
from unfreeze.data.store.examples import NO_CONTENT, Examples
from unfreeze.data.store.workers import Progress, encoded_parts
from unfreeze.data.tokens.forms import Reasoning
from unfreeze.data.tokens.masks import Supervise, Truncation
from unfreeze.data.tokens.tokenizer import Tokenizer
from unfreeze.data.tokens.turns import Turns

if TYPE_CHECKING:
    from unfreeze.data.packing.windows import InWindows

__all__ = ["Dataset", "Reading", "Stats", "encode_file", "encode_files"]

RAISE_LENGTH = "--sequence-length higher, if the model takes it"
"""Remedy for rows that are cut too short; job/data.py replaces it if something else limits the length."""
HELD_BYTES = 256 * 2**20
"""Data files with more bytes in total are read on demand. 256 MiB of text are about 70 million tokens, 0.5
GiB in memory."""


@dataclass(frozen=True)
class Dataset:
    """Examples in file order, and the statistics of their rows.

    `validation`: documents held out; none unless requested.
    `stream`: for large files, the remaining data; `examples` are then those of evenly spaced rows
    (streamed.py).
    """

    examples: Examples
    stats: Stats
    validation: Examples | None = None
    stream: InWindows | None = None

    def known(self) -> Examples:
        """Return all documents encoded so far."""
        return self.examples if self.stream is None else self.stream.so_far()

    def leaked(self) -> np.ndarray:
        """Return a mask [N] of validation documents whose content is also in the encoded training data.

        None for a split by content; a validation file can share rows with the data.
        """
        if self.validation is None:
            return np.zeros(0, dtype=bool)
        held_out = self.validation.digests_N.tolist()
        trained = set(held_out).intersection(self.known().digests_N.tolist())
        return np.array([digest in trained - {NO_CONTENT} for digest in held_out], dtype=bool)


def encode_file(path: str | Path, tokenizer: Tokenizer, sequence_length: int, **options: Any) -> Dataset:
    """Encode one file; see encode_files."""
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
    answers: Answers = "taught",
    room: int = 0,
    by_columns: bool = False,
    held_bytes: int = HELD_BYTES,
    store: Store | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Encode every row of the files, in order, as examples of at most `sequence_length` tokens.

    See Encoder for how a row becomes examples. Rows without a supervised token left are dropped and counted
    in stats. A bad row raises DataError, or is counted with on_bad_row "skip".
    columns: the files' own names for a row's fields (rows/columns.py). answers: how rows are used.
    room: of rows that are asked, tokens of the longest answer. by_columns: two of them are the same only if
    all their columns are, as where an environment makes the task of them.
    store: where to keep tokens. None: in memory, or read on demand if the files total more than `held_bytes`.
    The result is the same.
    workers: number of encoding processes (workers.py). 0: only this one; None: one per core if that pays off.
    The result is the same. progress: called with the number of rows done.
    Raises DataError if no examples are left.
    """
    if sequence_length < 2:
        raise ConfigError(
            f"sequence_length is {sequence_length}; it must be at least 2, because each token is predicted"
            " from the one before it"
        )
    paths = [Path(path) for path in paths]
    skip = on_bad_row == "skip"
    spec = Spec(
        tuple(map(str, paths)),
        tuple(columns),
        sequence_length,
        truncation,
        supervise,
        turns,
        reasoning,
        skip,
        answers,
        room,
        by_columns,
    )
    coder = Coder(spec, spec.encoder(tokenizer))
    if store is None:
        on_demand = sum(text_bytes(path) for path in paths if path.is_file()) > held_bytes
        store = OnDemand(paths, coder.encoder, columns) if on_demand else Held()
    account = Account(paths, skip=skip)
    # visit every row once: encode it, count it, record its lengths and checksum
    with closing(encoded_parts(batches(paths, columns), coder, spec, tokenizer, workers, progress)) as parts:
        for part in parts:
            if part.error:
                raise DataError(part.error[0], next=part.error[1])
            account.merge(part.stats, *part.rows)
            store.add(part)
    examples = Examples(store.fetch, store.columns)
    stats = account.finish(examples)
    stats.reading = store.reading
    if room:  # rows with one prompt may differ in other columns
        stats.room, stats.duplicates, stats.repeats = room, 0, []
    if not len(examples):
        raise _nothing_left(stats, paths, columns, answers)
    return Dataset(examples, stats)


def _nothing_left(stats: Stats, paths: Sequence[Path], columns: Sequence[str], answers: Answers) -> DataError:
    """Return the error for data without a usable row: each reason once, and a remedy for the first."""
    names = ", ".join(map(str, paths[:3])) + (f" and {len(paths) - 3} more files" if len(paths) > 3 else "")
    if not stats.rows:
        return DataError(
            f"{names}: no rows; the file is empty",
            next='give a file with rows, such as {"prompt": "…", "completion": "…"} on each line',
        )
    first = {item.reason.partition(": ")[2]: item.reason for item in reversed(stats.listed)}
    reasons = "; ".join(list(reversed(first.values()))[:3])
    remedy = "" if stats.bad else f"{RAISE_LENGTH}, or shorten the rows"
    for path in paths:
        try:
            next(iter(read_places(path, None, columns, answers)), None)
        except DataError as error:
            # skipping would leave no rows
            remedy = remedy or error.next.replace(", or --data.on-bad-row skip", "")
    return DataError(
        f"{names}: no row left to train on, of {stats.rows}: {reasons}", next=remedy or "correct the rows"
    )
