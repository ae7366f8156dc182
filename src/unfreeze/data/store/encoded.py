"""Cache encoded rows on disk, under a key of everything they depend on.

Encoding a row takes about 0.4 ms, so a million rows take minutes. The tokens are therefore cached. Every
process and every later start reads them memory-mapped, so their number does not matter.

A store is a folder in ~/.cache/unfreeze/encoded (or $XDG_CACHE_HOME), named by its key:
tokens    int32, documents concatenated              weights   float32, the same
numbers, digests, checksums   the Columns, in file order
starts    int64, start of each document in tokens and weights, which are in the order of encoding
account.json   the Stats, and a hash of the Columns

key: a hash of the data files (path, size, times), the tokenizer's files and its chat template's variables,
what the template knows about the date, the requested limits and masks, the code in this folder, and the
versions of libraries. If any of these changes, a new store is created. At most KEPT_BYTES are kept; the least
recently read stores are removed first.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import inspect
import json
import logging
import math
import mmap
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import jinja2
import numpy as np

from unfreeze.core.cache import cache_folder
from unfreeze.core.errors import DataError
from unfreeze.data.rows.files import text_bytes
from unfreeze.data.store.account import Reading, Stats
from unfreeze.data.store.dataset import HELD_BYTES, Dataset, encode_files
from unfreeze.data.store.documents import Documents
from unfreeze.data.store.encoding import EncodedRows, stats_of
from unfreeze.data.store.examples import NUMBERS, Columns, Example, Examples
from unfreeze.data.tokens.tokenizer import Tokenizer

log = logging.getLogger(__name__)

KEPT_BYTES = 32 * 2**30
"""4 billion tokens, 8 bytes each."""
LEAST_BYTES = 2**16
"""Smaller data is encoded at each start, which takes a tenth of a second."""
BYTES_A_BYTE = 2
"""Estimated store bytes per byte of data: a token takes 8 bytes and is about four characters."""
ABANDONED = 24 * 3600
"""Seconds after which an unfinished store is removed, because its process was killed."""
ENCODING = {
    name: inspect.signature(encode_files).parameters[name].default
    for name in ("truncation", "supervise", "turns", "reasoning", "columns", "answers", "room", "by_columns")
}
"""Options of encode_files that affect the encoding, with their defaults."""
COLUMNS = {"numbers": 8 * NUMBERS, "digests": 16, "checksums": 16, "starts": 8}
"""Files of per-document data, with their bytes per document."""


def encoded_files(
    paths: Sequence[str | Path], tokenizer: Tokenizer, sequence_length: int, **options: Any
) -> Dataset:
    """Return encode_files' result, from the cache if the files and options are unchanged.

    Nothing is cached if no store can be written, or if it would take more than half of the free disk space.
    """
    encode = partial(encode_files, paths, tokenizer, sequence_length, **options)
    encoding = {name: options.get(name, usual) for name, usual in ENCODING.items()}
    date_info = tokenizer.told()
    name = name_of([Path(path) for path in paths], tokenizer, date_info, sequence_length, encoding)
    if not name:
        return encode()
    if (dataset := whole(name, options.get("on_bad_row", "error"))) is not None:
        return dataset
    if (store := begun(name, paths)) is None:
        return encode()
    try:
        dataset = store.finish(encode(store=store))
        if tokenizer.told() != date_info:  # past midnight: this process still uses the mapped files
            shutil.rmtree(store.folder, ignore_errors=True)
        return dataset
    except OSError as error:  # most likely a full disk
        log.warning("encoded rows are not kept in %s, the next start encodes them again: %s", root(), error)
        # compressed files may hold more than text_bytes estimated; use the bytes written
        large = store.written > BYTES_A_BYTE * options.get("held_bytes", HELD_BYTES)
        return encode(held_bytes=0) if large else encode()
    finally:
        store.discard()


def whole(name: str, on_bad_row: str) -> Dataset | None:
    """Return a complete store if usable; skipping bad rows makes no difference if there are none."""
    dataset = read(name)
    return None if dataset is not None and dataset.stats.bad and on_bad_row == "error" else dataset


def begun(name: str, paths: Sequence[str | Path]) -> Writing | None:
    """Create a store; return None if it cannot be written or would take more than half of the free space."""
    try:
        needed, free = BYTES_A_BYTE * _size(paths), shutil.disk_usage(made(root())).free
        return Writing(name, free // 2) if 2 * needed <= free else None
    except OSError:
        return None


def _size(paths: Sequence[str | Path]) -> int:
    return sum(text_bytes(Path(path)) for path in paths)


def made(folder: Path) -> Path:
    """Return the folder, creating it if needed. Others get no access, because rows can be private."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def root() -> Path:
    """Return the folder of all stores."""
    return cache_folder("encoded")


def name_of(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    date_info: str | None,
    sequence_length: int,
    encoding: Mapping[str, object],
) -> str:
    """Return the name of the store for rows encoded with `encoding` (see ENCODING); "" if not cacheable.

    date_info: Tokenizer.told() before the first row
    """
    if date_info is None:
        return ""
    return key(paths, tokenizer.identity, {"length": sequence_length, "told": date_info, **encoding})


def key(paths: Sequence[Path], tokenizer: str, options: Mapping[str, object]) -> str:
    """Return a hash of everything the encoded rows depend on, 32 hex digits; "" if they should not be cached.

    tokenizer: Tokenizer.identity; "" if it is unknown
    """
    if not tokenizer or not all(path.is_file() for path in paths):
        return ""
    if _size(paths) < LEAST_BYTES:
        return ""
    stats = [path.stat() for path in paths]
    files = [
        (str(path.resolve()), file.st_size, file.st_mtime_ns, file.st_ctime_ns)
        for path, file in zip(paths, stats, strict=True)
    ]
    made_of = json.dumps([files, tokenizer, sorted(options.items()), _code()])
    return hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()


def _version_of(library: str) -> str:
    """Return the version of a library; "" if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


@functools.cache
def _code() -> str:
    versions = [jinja2.__version__, sys.version, *(_version_of(name) for name in ("pyarrow", "datasets"))]
    digest = hashlib.blake2b(json.dumps(versions).encode(), digest_size=16)
    package = Path(__file__).parents[1]
    for path in sorted(path for room in ("data", "untrusted") for path in (package / room).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Writing(Documents):
    """A store that is being written; rows added so far can already be read.

    It gets its final name once complete, so that no other process sees a partial store.
    """

    reading: Reading = "disk"

    def __init__(self, name: str, most: float = math.inf):
        """Open a store for writing.

        most: limit for bytes of tokens and weights. Above it, `add` raises OSError (sizes are estimates).
        """
        self.written, self._most = 0, most
        self.folder = root() / name
        self._part = root() / f".{name}.{os.getpid()}"
        shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir()
        self._files = [(self._part / name).open("wb") for name in ("tokens", "weights")]
        super().__init__(Columns(), *(Span((self._part / name).open("rb")) for name in ("tokens", "weights")))

    def add(self, part: EncodedRows) -> None:
        """Append rows. Raises OSError if they can't be written; earlier ones stay readable."""
        self.written += len(part.tokens) + len(part.weights)
        if self.written > self._most:
            raise OSError(errno.ENOSPC, "they take more than half of the free disk space")
        for file, content in zip(self._files, (part.tokens, part.weights), strict=True):
            file.write(content)
            file.flush()
        self._grow(part.columns)
        self.columns.extend(part.columns)

    def finish(self, dataset: Dataset) -> Dataset:
        """Complete the store; return the same dataset in the same order, now read from the store.

        Raises OSError if it can't be written.
        """
        for file in self._files:
            file.close()
        starts_N = np.array(self._starts_N, dtype=np.int64)[dataset.examples.places_N]
        for name, bytes_ in {**dataset.examples.columns(), "starts": starts_N.tobytes()}.items():
            (self._part / name).write_bytes(bytes_)
        account = {"stats": dataset.stats.as_dict(), "columns": _columns_hash(self._part)}
        (self._part / "account.json").write_text(json.dumps(account), encoding="utf-8")
        with suppress(OSError):  # another process was faster; its store has the same content
            self._part.rename(self.folder)
        make_room(self.folder)
        if (stored := read(self.folder.name)) is None:
            raise FileNotFoundError(self.folder)
        return stored

    def discard(self) -> None:
        """Remove an incomplete store's files. This process can still read it."""
        for file in self._files:
            with suppress(OSError):  # the disk may be too full to flush the buffer
                file.close()
        shutil.rmtree(self._part, ignore_errors=True)


class Span:
    """A file as bytes; slices are read on access."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def __getitem__(self, place: slice) -> bytes:
        self._file.seek(place.start)
        return self._file.read(place.stop - place.start)


def read(name: str) -> Dataset | None:
    """Open a complete store; return None if there is none.

    A damaged one is removed, so that it is created again.
    """
    folder = root() / name
    if not folder.is_dir():
        return None
    try:
        account = json.loads((folder / "account.json").read_text(encoding="utf-8"))
        stats = stats_of(account["stats"])
        if account["columns"] != _columns_hash(folder):
            raise ValueError("columns differ from those written")
        documents = _Mapped(folder, stats)
        with suppress(OSError):  # the cache may be read-only
            os.utime(folder / "account.json")  # time of the last use
        return Dataset(Examples(documents.fetch, documents.columns), stats)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    except OSError as error:  # out of memory or file handles; the store may be fine
        log.warning("encoded rows in %s cannot be read now and are encoded again: %s", folder, error)
        return None


def make_room(newest: Path, kept: int = KEPT_BYTES) -> None:
    """Remove the least recently read stores until at most `kept` bytes are left; never remove `newest`."""
    folders = sorted(root().iterdir())
    for part in (folder for folder in folders if folder.name.startswith(".")):
        with suppress(OSError):  # another process may remove or finish it
            written = max(file.stat().st_mtime for file in (part, *part.iterdir()))
            if time.time() - written > ABANDONED:
                shutil.rmtree(part, ignore_errors=True)
    stores: list[tuple[float, int, Path]] = []
    for folder in (folder for folder in folders if not folder.name.startswith(".")):
        with suppress(OSError):  # another process may remove it too
            size = sum(path.stat().st_size for path in folder.iterdir())
            stores.append(((folder / "account.json").stat().st_mtime, size, folder))
    total = sum(size for _, size, _ in stores)
    for _, size, folder in sorted(stores):
        if total <= kept:
            return
        if folder != newest:
            shutil.rmtree(folder, ignore_errors=True)
            total -= size


class _Mapped(Documents):
    """Documents of a store, memory-mapped: the system loads pages on access and can evict them."""

    def __init__(self, folder: Path, stats: Stats):
        columns, starts_N = _columns(folder), np.frombuffer(_map(folder / "starts"), dtype=np.int64)
        super().__init__(columns, _map(folder / "tokens"), _map(folder / "weights"), starts_N)
        self._folder = folder
        num_tokens = int(np.frombuffer(columns.numbers, dtype=np.int64)[::NUMBERS].sum())
        whole = len(self._tokens) == len(self._weights) == 4 * num_tokens
        if not whole or len(starts_N) != stats.examples:
            raise ValueError("fewer tokens than were written")

    def fetch(self, index: int) -> Example:
        """Return document `index`. Raises DataError if its tokens differ from those written."""
        example = super().fetch(index)
        if example.checksum != bytes(self.columns.checksums[16 * index : 16 * index + 16]):
            shutil.rmtree(self._folder, ignore_errors=True)
            raise DataError(
                f"{self._folder}: encoded row {example.row} is damaged on disk; the folder was removed",
                next="run the same command again; it encodes the rows again",
            )
        return example


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _columns(folder: Path) -> Any:
    """Return the Columns of a store, memory-mapped."""
    maps = {name: _map(folder / name) for name in COLUMNS}
    if len({len(maps[name]) / width for name, width in COLUMNS.items()}) > 1:
        raise ValueError("columns of different lengths")
    columns: Any = Columns()
    columns.numbers = memoryview(maps["numbers"]).cast("q")
    columns.digests, columns.checksums = maps["digests"], maps["checksums"]
    return columns


def _columns_hash(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in COLUMNS:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()
