"""Read large files in windows of rows, so that training starts before the last row is encoded.

Axes: R rows of all files, N documents. The training data is a function of files, options and seed:

    scan     -> location of each of R rows; which are held out, by their bytes           rows/scan.py
    head     -> HEAD evenly spaced rows are encoded to estimate the tokens per row
    window   -> `size` rows of an epoch's order, a permutation of the rows that are not held out. Its
                documents are shuffled and packed separately                             packing/windows.py

Rows are encoded in the order in which they are needed, by processes beside training (workers.py), a few
windows ahead. Their documents go into one growing store (encoded.py; documents.py if the disk has no room),
from which every window reads its rows. Once all rows are in it, it becomes the store of encoded_files for
every later start. A bad row stops the run when its window is needed.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.packing.windows import InWindows
from unfreeze.data.rows.files import text_bytes
from unfreeze.data.rows.scan import RowTable, are_lines
from unfreeze.data.store.account import Account, Stats
from unfreeze.data.store.dataset import HELD_BYTES, RAISE_LENGTH, Dataset
from unfreeze.data.store.documents import Continued, Held, OnDemand, Store
from unfreeze.data.store.encoded import ENCODING, Writing, begun, name_of, whole
from unfreeze.data.store.encoding import BATCH_BYTES, BATCH_ROWS, Coder, EncodedRows, RowBatch, Spec
from unfreeze.data.store.examples import Examples
from unfreeze.data.store.workers import LATER, Progress, encoded_parts
from unfreeze.data.tokens.tokenizer import Tokenizer

log = logging.getLogger(__name__)

HEAD = 2048
"""Number of rows used to estimate the length of the others."""
HEAD_BYTES, LEAST_HEAD = 2**21, 64
"""For long rows: maximum bytes of these (a second of encoding in one process), and minimum rows."""
WINDOW = 2**19
"""Minimum tokens per window: for short rows, a second of encoding on two cores."""
FULL = 64
"""Minimum batches per window: the last is half empty on average, which wastes 0.8 %."""
BATCHES_AHEAD = 64
"""Batches of rows that workers may be ahead: two windows of short rows. At most 32 MiB of rows, about 100 MB
with their encoding."""


def streamed_files(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    sequence_length: int,
    *,
    least: int,
    tokens_per_step: int,
    seed: int,
    validation_fraction: float = 0.0,
    start: Mapping[str, Any] | None = None,
    on_bad_row: str = "error",
    columns: Sequence[str] = (),
    workers: int | None = None,
    progress: Progress | None = None,
    look: Callable[[bytes], None] | None = None,
    **options: Any,
) -> Stream | None:
    """Return the files in windows; None if they have at most `least` rows or rows can't be read one by one.

    start: a cursor of Batches; what it needs is encoded first.
    options, on_bad_row, columns, workers: as for encode_files. progress: called while the first window is
    encoded.
    look: called with the bytes of every row.
    Raises DataError for a bad row in the first window, ConfigError if no row or every row would be held out.
    """
    from unfreeze.data.packing.split import none_left
    from unfreeze.data.rows.held_out import is_held_out

    paths = [Path(path) for path in paths]
    if not are_lines(paths, columns):
        return None

    def held(raw: bytes) -> bool:
        if look is not None:
            look(raw)
        return bool(validation_fraction) and is_held_out(raw, validation_fraction, seed)

    rows = RowTable(paths, columns, held)
    if len(rows) <= least:
        return None
    if validation_fraction and (rows.held_R.all() or not rows.held_R.any()):
        side = "training" if rows.held_R.all() else "validation"
        raise none_left(validation_fraction, f"{len(rows):,} rows", side)
    encoding = {name: options.get(name, usual) for name, usual in ENCODING.items() if name != "columns"}
    spec = Spec(
        paths=tuple(map(str, paths)),
        columns=tuple(columns),
        sequence_length=sequence_length,
        skip=on_bad_row == "skip",
        **encoding,
    )
    stream = Stream(rows, spec, tokenizer, tokens_per_step, seed, start, workers, progress)
    if stream.validation is not None and not len(stream.validation):
        stream.close()
        raise none_left(validation_fraction, f"{len(rows):,} rows", "validation")
    return stream


class Stream(InWindows):
    """The documents of large files, window by window, in one store that grows as rows are encoded.

    hand    called with every window that is opened, or its error, for other processes (handed.py)
    """

    def __init__(
        self,
        rows: RowTable,
        spec: Spec,
        tokenizer: Tokenizer,
        tokens_per_step: int,
        seed: int,
        start: Mapping[str, Any] | None,
        workers: int | None,
        progress: Progress | None,
    ):
        self.rows, self._tokenizer = rows, tokenizer
        self.hand: Callable[[Examples | DataError], object] = lambda window: None
        self._paths = [Path(path) for path in spec.paths]
        self._stood = [_stamp(path) for path in self._paths]
        self._coder = Coder(spec, spec.encoder(tokenizer))
        self._trained, self._epoch, self._order = np.flatnonzero(~rows.held_R), -1, np.zeros(0, dtype=int)
        # the documents of row r are first_R[r] to end_R[r] of the store; end_R is -1 if the row is not
        # encoded yet
        self._first_R, self._end_R = np.zeros(len(rows), dtype=int), np.full(len(rows), -1)
        self._left = len(rows)
        self._account = Account(self._paths, skip=spec.skip)
        self._parts: Generator[EncodedRows] | None = None
        self._written: Writing | None = None
        # a complete store from an earlier start, or a new one
        self._told = tokenizer.told()
        encoding = {name: getattr(spec, name) for name in ENCODING}
        name = name_of(self._paths, tokenizer, self._told, spec.sequence_length, encoding)
        if name and (cached := whole(name, "skip" if spec.skip else "error")) is not None:
            self._is_whole(cached.examples, cached.stats)
        else:
            self._written = begun(name, self._paths) if name else None
            self._store: Store = self._written or self._without_room()
        try:
            self.head = self._head()
            # window size that packing needs
            tokens_a_row = int(self.head.lengths_N.sum()) / len(self._head_rows)
            size = math.ceil(max(WINDOW, FULL * tokens_per_step) / tokens_a_row)
            super().__init__(seed, size, math.ceil(len(self._trained) / size), len(rows), rows.digest)
            self._begin(spec, start, workers, progress)
        except BaseException:
            self.close()
            raise
        # no training document has the content of a held-out one
        self._kept_out: set[bytes] = set()
        if rows.held_R.any():
            self.validation = self._documents(np.flatnonzero(rows.held_R))
            self._kept_out = set(self.validation.digests_N.tolist())
        self.head = self._without_held_out(self.head)

    # -- public interface

    def examples(self, epoch: int, number: int) -> Examples:
        rows = self._rows_of(epoch, number)
        try:
            self._wait(rows)
        except DataError as error:
            self.hand(error)
            raise
        documents = self._without_held_out(self._documents(rows))
        documents = documents.part(
            np.random.default_rng([self.seed, epoch, number]).permutation(len(documents))
        )
        self.hand(documents)
        return documents

    def take(self) -> None:
        """Collect rows that the workers have encoded so far, without waiting for more."""
        self._waits = False
        while self.whole is None and self.error is None and self._more():
            pass

    def so_far(self) -> Examples:
        if self.whole is not None:
            return self.whole
        return self._documents(np.flatnonzero(self._end_R >= 0))

    def stats(self) -> Stats:
        known = self.so_far()
        if self.whole is not None:
            stats = replace(self._account.stats)
        else:
            stats = replace(self._account.so_far(known), reading=self._store.reading)
        stats.held_out, stats.notes = len(self.validation or ()), stats.notes.copy()
        if self._kept_out:
            alike = sum(digest in self._kept_out for digest in known.digests_N.tolist())
            if alike > stats.held_out:
                note = "same content as a held-out row, spelled differently in JSON: left out"
                stats.notes[note] = alike - stats.held_out
        return stats

    def close(self) -> None:
        """End the workers. An incomplete store is removed."""
        if self._parts is not None:
            self._parts.close()
        if self._written is not None:
            self._written.discard()
            self._written = None

    # -- rows

    def _rows_of(self, epoch: int, number: int) -> np.ndarray:
        """Return the rows of a window, in file order."""
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self._trained)
            self._epoch = epoch
        return np.sort(self._order[number * self.size : (number + 1) * self.size])

    def _documents(self, rows: np.ndarray) -> Examples:
        """Return the documents of encoded rows, in the order of `rows`."""
        counts = self._end_R[rows] - self._first_R[rows]
        starts = np.repeat(self._first_R[rows] - np.cumsum(counts) + counts, counts)
        known = self.whole if self.whole is not None else Examples(self._store.fetch, self._store.columns)
        return known.part(starts + np.arange(len(starts)))

    def _without_held_out(self, documents: Examples) -> Examples:
        if not self._kept_out:
            return documents
        keep = [digest not in self._kept_out for digest in documents.digests_N.tolist()]
        return documents.part(np.array(keep, dtype=bool))

    def _batches_of(self, rows: np.ndarray) -> Iterator[tuple[RowBatch, list[int]]]:
        """Yield those of the rows that are not encoded yet, in file order, as batches read lazily."""
        groups: list[list[int]] = []
        size, source = 0, -1
        rows = rows[self._end_R[rows] < 0]
        for row, (file, _, _, num_bytes) in zip(
            rows.tolist(), self.rows.table_R4[rows].tolist(), strict=True
        ):
            if file != source or len(groups[-1]) >= BATCH_ROWS or size >= BATCH_BYTES:
                groups.append([])
                size, source = 0, file
            groups[-1].append(row)
            size += num_bytes
        for group in groups:
            source = int(self.rows.table_R4[group[0], 0])
            if _stamp(self._paths[source]) != self._stood[source]:
                raise DataError(
                    f"{self._paths[source].name}: the file changed during training",
                    next="start again, and leave the file unchanged during the run",
                )
            yield RowBatch(source, [self.rows.read(row) for row in group]), group

    # -- encoding

    def _head(self) -> Examples:
        """Encode the sampled rows from which lengths are estimated; held-out ones are left out."""
        rows = self.rows
        affordable = int(HEAD_BYTES * len(rows) / max(1, int(rows.table_R4[:, 3].sum())))
        count = min(HEAD, len(rows), max(LEAST_HEAD, affordable))
        self._head_rows = np.linspace(0, len(rows) - 1, count).astype(np.int64)
        for batch, group in self._batches_of(self._head_rows):
            self._keep(self._coder(batch), group)
        documents = self._documents(self._head_rows[~rows.held_R[self._head_rows]])
        if not len(documents):
            listed = self._account.stats.listed
            reason = listed[0].reason if listed else "all are held out"
            raise DataError(
                f"{self._paths[0].name}: no row left to train on, of {count:,} looked at: {reason}",
                next=f"correct the rows, or {RAISE_LENGTH}",
            )
        return documents

    def _begin(
        self, spec: Spec, start: Mapping[str, Any] | None, workers: int | None, progress: Progress | None
    ) -> None:
        """Encode the first rows needed: held-out rows, and the window of the cursor `start`."""
        epoch, first = (int(start["epoch"]), int(start["window"])) if start else (0, 0)
        if epoch < 0 or not 0 <= first < self.count:
            raise ConfigError(
                f"cannot resume: the data changed (there is no window {first} in epoch {epoch})",
                next="restore the data, or start a new run with another --out",
            )
        if self.whole is not None:
            return
        held_out = np.flatnonzero(self.rows.held_R)
        needed = np.concatenate([held_out, self._trained if epoch else self._rows_of(0, first)])
        needed = needed[self._end_R[needed] < 0]
        total = int(self.rows.table_R4[needed, 3].sum())
        self._coming: deque[list[int]] = deque()

        def batches() -> Iterator[RowBatch]:
            for place in range(-1, self.count):
                rows = held_out if place < 0 else self._rows_of(0, (first + place) % self.count)
                for batch, group in self._batches_of(rows):
                    self._coming.append(group)
                    yield batch

        def told(rows: int, done: int, _: int) -> None:
            if self._waits and progress is not None and done <= total:
                progress(rows, done, total)

        self._parts = encoded_parts(
            batches(),
            self._coder,
            spec,
            self._tokenizer,
            workers,
            told,
            ahead=BATCHES_AHEAD,
            waits=lambda: self._waits,
        )
        self._wait(needed)

    def _wait(self, rows: np.ndarray) -> None:
        self._waits = True
        for row in rows.tolist():
            while self._end_R[row] < 0:
                if self.error is not None:
                    raise self.error
                self._more()

    def _more(self) -> bool:
        """Take the next part; return False if it is not ready or a row was bad."""
        assert self._parts is not None
        try:
            part = next(self._parts)
            if part is LATER:
                return False
            self._keep(part, self._coming.popleft())
        except DataError as error:
            self.error = error
            return False
        return True

    def _keep(self, part: EncodedRows, rows: list[int]) -> None:
        """Store the encoded `rows`. If the disk is full, training continues without the store."""
        if part.error:
            raise DataError(part.error[0], next=part.error[1])
        begin = len(self._store.columns)
        try:
            self._store.add(part)
        except OSError as error:
            self._given_up(error)
            self._store = Continued(self._store, self._without_room())
            self._store.add(part)
        self._place(rows, Examples(self._store.fetch, part.columns), begin)
        self._account.merge(part.stats, *part.rows)
        self._left -= len(rows)
        if not self._left:
            self._finish()

    def _place(self, rows: Any, examples: Examples, begin: int) -> None:
        """Record the positions of the documents of `rows`: `examples` in order, starting at `begin`."""
        keys_N = examples.sources_N << 40 | examples.rows_N
        keys_R = self.rows.table_R4[rows, 0] << 40 | self.rows.table_R4[rows, 1]
        self._first_R[rows] = begin + np.searchsorted(keys_N, keys_R, "left")
        self._end_R[rows] = begin + np.searchsorted(keys_N, keys_R, "right")

    def _without_room(self) -> Store:
        """Return a store in memory, or one that reads rows again at every access."""
        small = sum(map(text_bytes, self._paths)) <= HELD_BYTES
        return Held() if small else OnDemand(self._paths, self._coder.encoder, self._coder.columns)

    def _given_up(self, error: OSError) -> None:
        log.warning("encoded rows are not kept, the next start encodes them again: %s", error)
        if self._written is not None:
            self._written.discard()
            self._written = None

    def _finish(self) -> None:
        """Complete the store once every row is encoded."""
        examples = self._documents(np.arange(len(self.rows)))
        stats = self._account.finish(examples)
        stats.reading = self._store.reading
        if self._written is not None:
            try:
                examples = self._written.finish(Dataset(examples, stats)).examples
                # past midnight: this process still uses the mapped files
                if self._tokenizer.told() != self._told:
                    shutil.rmtree(self._written.folder, ignore_errors=True)
            except OSError as error:
                self._given_up(error)
        self.close()
        self._is_whole(examples, stats)

    def _is_whole(self, examples: Examples, stats: Stats) -> None:
        self._account.stats, self.whole = stats, examples
        self._place(slice(None), examples, 0)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
