"""Large files in windows of rows, so that training begins with its first rows and not behind the last.

R rows of all files, N documents. What is trained on is a function of files, options and seed:

    scan     -> where each of R rows stands; which are held out, by their bytes          rows/scan.py
    head     -> HEAD rows at even distances are encoded: they tell how many tokens a row has
    window   -> `size` rows of an epoch's order, a permutation of the rows that are not held out. Its
                documents are shuffled and packed by themselves                          packing/windows.py

Windows are encoded in the order in which they are needed, by processes beside training (workers.py), a few
ahead. What they give is kept (encoded.py); once all are there, every window is looked up in it, and so it is
at the next start. A row that is bad stops the run when its window is needed.
"""

from __future__ import annotations

import logging
import math
import shutil
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.rows.files import text_bytes
from unfreeze.data.rows.scan import RowTable, are_lines
from unfreeze.data.store.account import Account, Reading, Stats
from unfreeze.data.store.dataset import HELD_BYTES, RAISE_LENGTH, Dataset
from unfreeze.data.store.documents import Held, OnDemand
from unfreeze.data.store.encoded import COLUMNS, ENCODING, Writing, begun, key, whole
from unfreeze.data.store.encoding import BATCH_BYTES, BATCH_ROWS, Coder, EncodedRows, RowBatch, Spec
from unfreeze.data.store.examples import Columns, Example, Examples
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
HELD_OUT = -1
"""Number of the window of rows that are held out."""


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


class Stream:
    """The documents of large files, window by window.

    size        rows of a window                windows   how many of them an epoch has
    head        documents of some rows at even distances, of those that are trained on
    validation  documents held out; None if not asked for
    whole       all documents in the order of the files, once every row is encoded; None before
    error       of a bad row, behind which nothing is encoded
    hand        is given every window that is opened, or its error, for other processes (handed.py)
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
        self.rows, self.seed, self._spec, self._tokenizer = rows, seed, spec, tokenizer
        self.hand: Callable[[Examples | DataError], None] = lambda found: None
        self._paths = [Path(path) for path in spec.paths]
        self._stood = [_stamp(path) for path in self._paths]
        self._small = sum(map(text_bytes, self._paths)) <= HELD_BYTES
        # the head
        affordable = int(HEAD_BYTES * len(rows) / max(1, int(rows.table_R4[:, 3].sum())))
        count = min(HEAD, len(rows), max(LEAST_HEAD, affordable))
        head_rows = np.linspace(0, len(rows) - 1, count).astype(np.int64)
        self._coder = Coder(spec, spec.encoder(tokenizer))
        head = self._encode_head(head_rows)
        # windows as large as packing wants them
        self._trained = np.flatnonzero(~rows.held_R)
        tokens_a_row = int(head.lengths_N.sum()) / len(head_rows)
        self.size = math.ceil(max(WINDOW, FULL * tokens_per_step) / tokens_a_row)
        self.windows = math.ceil(len(self._trained) / self.size)
        self._epoch, self._order = -1, self._trained
        # what is encoded by now: windows in that order
        self.whole: Examples | None = None
        self._windows: dict[int, Examples] = {}
        self._account, self._stats = Account(self._paths, skip=spec.skip), Stats()
        self.error: DataError | None = None
        # everything from an earlier start; or the first window, and a store for all
        self._told = tokenizer.told()
        given = {name: getattr(spec, name) for name in ENCODING}
        given |= {"length": spec.sequence_length, "told": self._told, "head": count}
        name = key(self._paths, tokenizer.identity, given) if self._told is not None else ""
        self._store: Writing | None = None
        self._parts: Generator[EncodedRows] | None = None
        if name and (found := whole(name, "skip" if spec.skip else "error")) is not None:
            self._is_whole(found.examples, found.stats)
        else:
            self._store = begun(name, self._paths) if name else None
            self._new_window()
            try:
                self._begin(start, workers, progress)
            except BaseException:
                self.close()
                raise
        # no document that is trained on says what one of those held out says
        self.validation = self._documents(0, HELD_OUT) if rows.held_R.any() else None
        self._kept_out: set[bytes] = set()
        if self.validation is not None:
            self._kept_out = set(self.validation.digests_N.tolist())
        self.head = self._without_held_out(head)

    # -- what is asked of it

    def window(self, epoch: int, number: int) -> Examples:
        """The documents of a window in the order of training; waits until its rows are encoded.

        Raises DataError for a bad row in it, or in one before it that was not there yet.
        """
        try:
            self._wait(epoch, number)
        except DataError as error:
            self.hand(error)
            raise
        found = self._without_held_out(self._documents(epoch, number))
        found = found.part(np.random.default_rng([self.seed, epoch, number]).permutation(len(found)))
        self.hand(found)
        return found

    def take(self) -> None:
        """Take what the processes have encoded by now, without waiting for more."""
        self._waits = False
        while self.whole is None and self.error is None and self._more():
            pass

    def known(self) -> list[Examples]:
        """All documents that are encoded by now."""
        return [*self._windows.values()] if self.whole is None else [self.whole]

    def stats(self) -> Stats:
        """The account of the rows that are encoded by now."""
        stats, known = replace(self._stats), self.known()
        if self.whole is None:
            stats = replace(self._account.stats, reading=self._reading)
        stats.held_out, stats.notes = len(self.validation or ()), stats.notes.copy()
        digests = (digest for each in known for digest in each.digests_N.tolist() if self._kept_out)
        if (alike := sum(digest in self._kept_out for digest in digests)) > stats.held_out:
            stats.notes["as a row held out, in other words of JSON: left out"] = alike - stats.held_out
        return stats

    def close(self) -> None:
        """End the processes. A store that is not whole is not kept."""
        if self._parts is not None:
            self._parts.close()
        if self._store is not None:
            self._store.discard()
            self._store = None

    # -- rows

    def _rows_of(self, epoch: int, number: int) -> np.ndarray:
        """Rows of a window, in the order of the files."""
        if number == HELD_OUT:
            return np.flatnonzero(self.rows.held_R)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self._trained)
            self._epoch = epoch
        return np.sort(self._order[number * self.size : (number + 1) * self.size])

    def _documents(self, epoch: int, number: int) -> Examples:
        """Documents of a window that is encoded, in the order of the files."""
        if self.whole is None:
            return self._windows[number]
        rows = self._rows_of(epoch, number)
        counts = self._end_R[rows] - self._first_R[rows]
        starts = np.repeat(self._first_R[rows] - np.cumsum(counts) + counts, counts)
        return self.whole.part(starts + np.arange(len(starts)))

    def _without_held_out(self, found: Examples) -> Examples:
        if not self._kept_out:
            return found
        keep = [digest not in self._kept_out for digest in found.digests_N.tolist()]
        return found.part(np.array(keep, dtype=bool))

    def _batches_of(self, rows: np.ndarray) -> Iterator[tuple[RowBatch, bool]]:
        """Rows, in the order of the files, as batches that are read now; and whether one is the last."""
        groups: list[list[int]] = []
        size, source = 0, -1
        for row, (file, _, _, num_bytes) in zip(
            rows.tolist(), self.rows.table_R4[rows].tolist(), strict=True
        ):
            if file != source or len(groups[-1]) >= BATCH_ROWS or size >= BATCH_BYTES:
                groups.append([])
                size, source = 0, file
            groups[-1].append(row)
            size += num_bytes
        for place, group in enumerate(groups):
            source = int(self.rows.table_R4[group[0], 0])
            if _stamp(self._paths[source]) != self._stood[source]:
                raise DataError(
                    f"{self._paths[source].name}: the file changed while it was trained on",
                    next="start again with a file that stays as it is",
                )
            yield RowBatch(source, [self.rows.read(row) for row in group]), place == len(groups) - 1

    # -- encoding

    def _encode_head(self, rows: np.ndarray) -> Examples:
        """Of the rows `rows`. What is held out is left out."""
        store, columns, account = Held(), Columns(), Account(self._paths, skip=self._spec.skip)
        for batch, _ in self._batches_of(rows):
            part = self._coder(batch)
            if part.error:
                raise DataError(part.error[0], next=part.error[1])
            store.add(part)
            columns.extend(part.columns)
            account.merge(part.stats, *part.rows)
        held = {tuple(place) for place in self.rows.table_R4[rows[self.rows.held_R[rows]], :2].tolist()}
        found = Examples(store.fetch, columns)
        places = zip(found.sources_N.tolist(), found.rows_N.tolist(), strict=True)
        found = found.part(np.array([place not in held for place in places], dtype=bool))
        if not len(found):
            reason = account.stats.listed[0].reason if account.stats.listed else "all are held out"
            raise DataError(
                f"{self._paths[0].name}: no row left to train on, of {len(rows):,} looked at: {reason}",
                next=f"mend the rows, or {RAISE_LENGTH}",
            )
        return found

    def _begin(self, start: Mapping[str, Any] | None, workers: int | None, progress: Progress | None) -> None:
        """Encode what is needed first: what is held out, and the window in which the cursor `start` is."""
        epoch, first = (int(start["epoch"]), int(start["window"])) if start else (0, 0)
        if epoch < 0 or not 0 <= first < self.windows:
            raise ConfigError(
                f"cannot resume: the data changed (there is no window {first} in epoch {epoch})",
                next="restore the data, or start a new run with another --out",
            )
        numbers = [HELD_OUT] if self.rows.held_R.any() else []
        numbers += [(place + (0 if epoch else first)) % self.windows for place in range(self.windows)]
        self._left = len(numbers)
        self._coming: deque[tuple[int, bool]] = deque()
        waited = numbers if epoch else numbers[: numbers.index(first) + 1]
        total = sum(int(self.rows.table_R4[self._rows_of(0, number), 3].sum()) for number in waited)

        def batches() -> Iterator[RowBatch]:
            for number in numbers:
                for batch, last in self._batches_of(self._rows_of(0, number)):
                    self._coming.append((number, last))
                    yield batch

        def told(rows: int, done: int, _: int) -> None:
            if self._waits and progress is not None and done <= total:
                progress(rows, done, total)

        self._parts = encoded_parts(
            batches(),
            self._coder,
            self._spec,
            self._tokenizer,
            workers,
            told,
            ahead=BATCHES_AHEAD,
            waits=lambda: self._waits,
        )
        self._wait(epoch, first)

    def _wait(self, epoch: int, number: int) -> None:
        self._waits = True
        while self.whole is None and (epoch or number not in self._windows):
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
            if part.error:
                raise DataError(part.error[0], next=part.error[1])
        except DataError as error:
            self.error = error
            return False
        number, last = self._coming.popleft()
        self._account.merge(part.stats, *part.rows)
        self._account.stats.add(part.columns)
        self._columns.extend(part.columns)
        self._num_bytes += len(part.tokens)
        self._kept.add(part)
        with self._writing():
            if self._store is not None:
                self._store.add(part)
        if last:
            self._end_window(number)
        return True

    def _new_window(self) -> None:
        """In memory, or read again where a store is not there, or fails."""
        again = partial(OnDemand, self._paths, self._coder.encoder, self._spec.columns)
        self._kept = Held() if self._store is None and self._small else again()
        self._columns, self._num_bytes = Columns(), 0
        self._reading: Reading = self._kept.reading if self._store is None else "disk"

    def _end_window(self, number: int) -> None:
        fetch = self._kept.fetch
        with self._writing():
            if self._store is not None:
                fetch = self._store.latest(self._columns, self._num_bytes).fetch
        self._windows[number] = Examples(fetch, self._columns)
        self._new_window()
        self._left -= 1
        if not self._left:
            self._finish()

    @contextmanager
    def _writing(self) -> Generator[None]:
        """Where no more can be written, training goes on without the store."""
        try:
            yield
        except OSError as error:
            log.warning("encoded rows are not kept, the next start encodes them again: %s", error)
            if self._store is not None:
                self._store.discard()
                self._store = None

    def _finish(self) -> None:
        windows = [*self._windows.values()]
        columns = [each.columns() for each in windows]
        ends = np.cumsum([len(each) for each in windows]).tolist()

        def fetch(index: int) -> Example:
            place = bisect_right(ends, index)
            return windows[place][index - ends[place] + len(windows[place])]

        together = Columns.of(*(b"".join(each[name] for each in columns) for name in COLUMNS))
        examples = Examples(fetch, together)
        stats = self._account.finish(examples)
        stats.reading = self._reading
        with self._writing():
            if self._store is not None:
                examples = self._store.finish(Dataset(examples, stats)).examples
                if self._tokenizer.told() != self._told:  # midnight came in between: what is mapped stays
                    shutil.rmtree(self._store.folder, ignore_errors=True)
        self.close()
        self._is_whole(examples, stats)

    def _is_whole(self, examples: Examples, stats: Stats) -> None:
        """Every row is encoded: documents are found by their row."""
        keys_N = examples.sources_N << 40 | examples.rows_N
        order_N = np.argsort(keys_N, kind="stable")
        keys_R = self.rows.table_R4[:, 0] << 40 | self.rows.table_R4[:, 1]
        self._first_R = np.searchsorted(keys_N[order_N], keys_R, "left")
        self._end_R = np.searchsorted(keys_N[order_N], keys_R, "right")
        self._stats, self.whole = stats, examples.part(order_N)
        self._windows.clear()


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
