"""Large files in windows of rows, so that training begins with its first rows and not behind the last.

R rows of all files, N documents. What is trained on is a function of files, options and seed:

    scan     -> where each of R rows stands; which are held out, by their bytes          rows/scan.py
    head     -> HEAD rows at even distances are encoded: they tell how many tokens a row has
    window   -> `size` rows of an epoch's order, a permutation of the rows that are not held out. Its
                documents are shuffled and packed by themselves                          packing/windows.py

Rows are encoded in the order in which they are needed, by processes beside training (workers.py), a few
windows ahead. Their documents go into one store that grows (encoded.py; documents.py where the disk has no
room), in which every window is looked up by its rows. Once all rows are there it is the store of
encoded_files, for every later start. A row that is bad stops the run when its window is needed.
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
"""Rows that tell how long the others are."""
HEAD_BYTES, LEAST_HEAD = 2**21, 64
"""Where rows are long, so many bytes of them: a second of encoding in one process. And at least so many."""
WINDOW = 2**19
"""Tokens of a window, at least: of small rows a second of encoding on two cores."""
FULL = 64
"""Batches that a window fills, at least: the last of them is half empty on average, which is 0.8 %."""
BATCHES_AHEAD = 64
"""Batches of rows that processes are given ahead, two windows of small rows: at most 32 MiB of rows, some
100 MB with what becomes of them."""


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
    """The files in windows; None where they have up to `least` rows, or rows can't be read one by one.

    start: a cursor of Batches; what it needs is encoded first.
    options, on_bad_row, columns, workers: as of encode_files. progress: is told how the first window comes.
    look: is called with the bytes of every row.
    Raises DataError for a bad row in the first window, ConfigError where none, or all, would be held out.
    """
    from unfreeze.data.packing.split import is_held_out, none_left

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
    asked = {name: options.get(name, usual) for name, usual in ENCODING.items() if name != "columns"}
    spec = Spec(
        paths=tuple(map(str, paths)),
        columns=tuple(columns),
        sequence_length=sequence_length,
        skip=on_bad_row == "skip",
        **asked,
    )
    stream = Stream(rows, spec, tokenizer, tokens_per_step, seed, start, workers, progress)
    if stream.validation is not None and not len(stream.validation):
        stream.close()
        raise none_left(validation_fraction, f"{len(rows):,} rows", "validation")
    return stream


class Stream(InWindows):
    """The documents of large files, window by window, in one store that grows as rows are encoded.

    hand    is given every window that is opened, or its error, for other processes (handed.py)
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
        self.hand: Callable[[Examples | DataError], object] = lambda found: None
        self._paths = [Path(path) for path in spec.paths]
        self._stood = [_stamp(path) for path in self._paths]
        self._coder = Coder(spec, spec.encoder(tokenizer))
        self._trained, self._epoch, self._order = np.flatnonzero(~rows.held_R), -1, np.zeros(0, dtype=int)
        # the documents of row r are first_R[r] to end_R[r] of the store; those of a row to come end at -1
        self._first_R, self._end_R = np.zeros(len(rows), dtype=int), np.full(len(rows), -1)
        self._left = len(rows)
        self._account = Account(self._paths, skip=spec.skip)
        self._parts: Generator[EncodedRows] | None = None
        self._written: Writing | None = None
        # everything from an earlier start, or a store for all
        self._told = tokenizer.told()
        asked = {name: getattr(spec, name) for name in ENCODING}
        name = name_of(self._paths, tokenizer, self._told, spec.sequence_length, asked)
        if name and (found := whole(name, "skip" if spec.skip else "error")) is not None:
            self._is_whole(found.examples, found.stats)
        else:
            self._written = begun(name, self._paths) if name else None
            self._store: Store = self._written or self._without_room()
        try:
            self.head = self._head()
            # windows as large as packing wants them
            tokens_a_row = int(self.head.lengths_N.sum()) / len(self._head_rows)
            size = math.ceil(max(WINDOW, FULL * tokens_per_step) / tokens_a_row)
            super().__init__(seed, size, math.ceil(len(self._trained) / size), len(rows), rows.digest)
            self._begin(spec, start, workers, progress)
        except BaseException:
            self.close()
            raise
        # no document that is trained on says what one of those held out says
        self._kept_out: set[bytes] = set()
        if rows.held_R.any():
            self.validation = self._documents(np.flatnonzero(rows.held_R))
            self._kept_out = set(self.validation.digests_N.tolist())
        self.head = self._without_held_out(self.head)

    # -- what is asked of it

    def examples(self, epoch: int, number: int) -> Examples:
        rows = self._rows_of(epoch, number)
        try:
            self._wait(rows)
        except DataError as error:
            self.hand(error)
            raise
        found = self._without_held_out(self._documents(rows))
        found = found.part(np.random.default_rng([self.seed, epoch, number]).permutation(len(found)))
        self.hand(found)
        return found

    def take(self) -> None:
        """Take what the processes have encoded by now, without waiting for more."""
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
                note = "as a row held out, in other words of JSON: left out"
                stats.notes[note] = alike - stats.held_out
        return stats

    def close(self) -> None:
        """End the processes. A store that is not whole is not kept."""
        if self._parts is not None:
            self._parts.close()
        if self._written is not None:
            self._written.discard()
            self._written = None

    # -- rows

    def _rows_of(self, epoch: int, number: int) -> np.ndarray:
        """Rows of a window, in the order of the files."""
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self._trained)
            self._epoch = epoch
        return np.sort(self._order[number * self.size : (number + 1) * self.size])

    def _documents(self, rows: np.ndarray) -> Examples:
        """Documents of rows that are encoded, in the order of `rows`."""
        counts = self._end_R[rows] - self._first_R[rows]
        starts = np.repeat(self._first_R[rows] - np.cumsum(counts) + counts, counts)
        known = self.whole if self.whole is not None else Examples(self._store.fetch, self._store.columns)
        return known.part(starts + np.arange(len(starts)))

    def _without_held_out(self, found: Examples) -> Examples:
        if not self._kept_out:
            return found
        keep = [digest not in self._kept_out for digest in found.digests_N.tolist()]
        return found.part(np.array(keep, dtype=bool))

    def _batches_of(self, rows: np.ndarray) -> Iterator[tuple[RowBatch, list[int]]]:
        """Those rows, in the order of the files, that are not encoded yet: as batches that are read now."""
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
                    f"{self._paths[source].name}: the file changed while it was trained on",
                    next="start again with a file that stays as it is",
                )
            yield RowBatch(source, [self.rows.read(row) for row in group]), group

    # -- encoding

    def _head(self) -> Examples:
        """Documents of the rows that tell how long the others are. What is held out is left out."""
        rows = self.rows
        affordable = int(HEAD_BYTES * len(rows) / max(1, int(rows.table_R4[:, 3].sum())))
        count = min(HEAD, len(rows), max(LEAST_HEAD, affordable))
        self._head_rows = np.linspace(0, len(rows) - 1, count).astype(np.int64)
        for batch, group in self._batches_of(self._head_rows):
            self._keep(self._coder(batch), group)
        found = self._documents(self._head_rows[~rows.held_R[self._head_rows]])
        if not len(found):
            listed = self._account.stats.listed
            reason = listed[0].reason if listed else "all are held out"
            raise DataError(
                f"{self._paths[0].name}: no row left to train on, of {count:,} looked at: {reason}",
                next=f"mend the rows, or {RAISE_LENGTH}",
            )
        return found

    def _begin(
        self, spec: Spec, start: Mapping[str, Any] | None, workers: int | None, progress: Progress | None
    ) -> None:
        """Encode what is needed first: what is held out, and the window in which the cursor `start` is."""
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
        """Take the next part; False where it is not there yet, or a row was bad."""
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
        """What became of `rows`. Where no more can be written, training goes on without the store."""
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
        """Note where the documents of `rows` lie: `examples`, in their order, from `begin` on."""
        keys_N = examples.sources_N << 40 | examples.rows_N
        keys_R = self.rows.table_R4[rows, 0] << 40 | self.rows.table_R4[rows, 1]
        self._first_R[rows] = begin + np.searchsorted(keys_N, keys_R, "left")
        self._end_R[rows] = begin + np.searchsorted(keys_N, keys_R, "right")

    def _without_room(self) -> Store:
        """In memory, or read again at every visit."""
        small = sum(map(text_bytes, self._paths)) <= HELD_BYTES
        return Held() if small else OnDemand(self._paths, self._coder.encoder, self._coder.columns)

    def _given_up(self, error: OSError) -> None:
        log.warning("encoded rows are not kept, the next start encodes them again: %s", error)
        if self._written is not None:
            self._written.discard()
            self._written = None

    def _finish(self) -> None:
        """Every row is encoded."""
        examples = self._documents(np.arange(len(self.rows)))
        stats = self._account.finish(examples)
        stats.reading = self._store.reading
        if self._written is not None:
            try:
                examples = self._written.finish(Dataset(examples, stats)).examples
                if self._tokenizer.told() != self._told:  # midnight came in between: what is mapped stays
                    shutil.rmtree(self._written.folder, ignore_errors=True)
            except OSError as error:
                self._given_up(error)
        self.close()
        self._is_whole(examples, stats)

    def _is_whole(self, examples: Examples, stats: Stats) -> None:
        self._account.stats, self.whole = stats, examples
        self._place(slice(None), examples, 0)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
