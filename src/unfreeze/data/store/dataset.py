"""Data files as examples, and an account of every row: used, cut, dropped or bad; duplicates; held out.

N documents. Memory: about 90 bytes a document. Tokens lie on disk (encoded.py); or in memory, 8 bytes each,
if the files together have up to HELD_BYTES. Larger data for which the disk has no room is read once to count
and check it, and each document is read and encoded again when a batch needs it: that takes 40 more bytes a
document instead of the tokens, and the memory of one row. Memory peaks in the search for duplicates: 330
bytes a document were measured (175,000 rows, resident size).
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
"""Remedy of rows that are cut too short; job/data.py says another where something else bounds them."""
HELD_BYTES = 256 * 2**20
"""Data files with more bytes in total are read on demand. 256 MiB of text are some 70 million tokens, 0.5 GiB
in memory."""


@dataclass(frozen=True)
class Dataset:
    """Examples in the order of the files, and the account of how they came to be.

    `validation`: documents held out, none if not asked for.
    `stream`: of large files, the rest; `examples` are then those of rows at even distances (streamed.py).
    """

    examples: Examples
    stats: Stats
    validation: Examples | None = None
    stream: InWindows | None = None

    def known(self) -> Examples:
        """All documents that are encoded by now."""
        return self.examples if self.stream is None else self.stream.so_far()

    def leaked(self) -> np.ndarray:
        """[N]: which validation documents say what is also trained on, as far as that is encoded.

        None where the split is by content; a validation file can share rows with the data.
        """
        if self.validation is None:
            return np.zeros(0, dtype=bool)
        held_out = self.validation.digests_N.tolist()
        trained = set(held_out).intersection(self.known().digests_N.tolist())
        return np.array([digest in trained - {NO_CONTENT} for digest in held_out], dtype=bool)


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
    answers: Answers = "taught",
    held_bytes: int = HELD_BYTES,
    store: Store | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Every row of the files, one file after the other, as examples of at most `sequence_length` tokens.

    How a row becomes examples: see Encoder. Rows that keep no supervised token are dropped and counted in
    stats; a bad row raises DataError, or is counted with on_bad_row "skip".
    columns: the files' own names of a row's fields (rows/columns.py). answers: what rows are read for.
    store: where tokens are kept. None: in memory, or nowhere if the files have more than `held_bytes`
    together: they are then read on demand. The result is the same.
    workers: processes that encode (workers.py); 0: only this one; None: one a core where that pays. The
    result is the same. progress: is told of the rows that are done.
    Raises DataError if nothing is left.
    """
    if sequence_length < 2:
        raise ConfigError(
            f"sequence_length is {sequence_length}, at least 2: a token is predicted from the one before it"
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
    )
    coder = Coder(spec, spec.encoder(tokenizer))
    if store is None:
        on_demand = sum(text_bytes(path) for path in paths if path.is_file()) > held_bytes
        store = OnDemand(paths, coder.encoder, columns) if on_demand else Held()
    account = Account(paths, skip=skip)
    # every row once: encoded, counted, its lengths and checksum noted
    with closing(encoded_parts(batches(paths, columns), coder, spec, tokenizer, workers, progress)) as parts:
        for part in parts:
            if part.error:
                raise DataError(part.error[0], next=part.error[1])
            account.merge(part.stats, *part.rows)
            store.add(part)
    examples = Examples(store.fetch, store.columns)
    stats = account.finish(examples)
    stats.reading = store.reading
    if not len(examples):
        raise _nothing_left(stats, paths, columns, answers)
    return Dataset(examples, stats)


def _nothing_left(stats: Stats, paths: Sequence[Path], columns: Sequence[str], answers: Answers) -> DataError:
    """Why no row can be trained on, each reason once, and what to do about the first."""
    names = ", ".join(map(str, paths[:3])) + (f" and {len(paths) - 3} more files" if len(paths) > 3 else "")
    if not stats.rows:
        return DataError(
            f"{names}: no row in it; the file is empty",
            next='give --data a file with rows, such as {"prompt": "…", "completion": "…"} on each line',
        )
    first = {item.reason.partition(": ")[2]: item.reason for item in reversed(stats.listed)}
    reasons = "; ".join(list(reversed(first.values()))[:3])
    remedy = "" if stats.bad else f"{RAISE_LENGTH}, or shorten the rows"
    for path in paths:
        try:
            next(iter(read_places(path, None, columns, answers)), None)
        except DataError as error:
            remedy = remedy or error.next.replace(", or --data.on-bad-row skip", "")  # which leaves none
    return DataError(
        f"{names}: no row left to train on, of {stats.rows}: {reasons}", next=remedy or "mend the rows"
    )
