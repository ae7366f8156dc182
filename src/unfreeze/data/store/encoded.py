"""Encoded rows on disk, found again by what they were made of.

Encoding a row takes some 0.4 ms, so a million take minutes. Its tokens are therefore kept, and every process
and every later start reads them: mapped into memory, so that their number does not matter.

A store is a folder of ~/.cache/unfreeze/encoded ($XDG_CACHE_HOME where it is set), named after its key:
  tokens    int32, one document after the other        weights   float32, the same
  numbers, digests, checksums   the Columns, in the order of the files
  starts    int64, where each document begins in tokens and in weights: in the order in which it was encoded
  account.json   the Stats, and a hash of the Columns

key: a hash of the data files (path, size, times), of the tokenizer's files and its chat template's variables,
of what the template tells of the date, of the bounds and masks that were asked for, of the code in this
folder and the libraries' versions. Whatever changes makes another store. At most KEPT_BYTES are kept; the
stores that were not read for longest go first.
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
"""4 billion tokens: 8 bytes each."""
LEAST_BYTES = 2**16
"""Smaller data is encoded at each start: that takes a tenth of a second."""
BYTES_A_BYTE = 2
"""Of a store, for each of the data files: 8 bytes for a token, which is some four characters."""
ABANDONED = 24 * 3600
"""Seconds after which a store that nobody finished is removed: its process was killed."""
ENCODING = {
    name: inspect.signature(encode_files).parameters[name].default
    for name in ("truncation", "supervise", "turns", "reasoning", "columns", "answers")
}
"""Options of encode_files that say what a row becomes, and what they are where they are not given."""
COLUMNS = {"numbers": 8 * NUMBERS, "digests": 16, "checksums": 16, "starts": 8}
"""Files with so many bytes of each document."""


def encoded_files(
    paths: Sequence[str | Path], tokenizer: Tokenizer, sequence_length: int, **options: Any
) -> Dataset:
    """encode_files, or what it gave for the same files and options before.

    Where no store can be written, or it would take more than half of what the disk has free, nothing is kept.
    """
    encode = partial(encode_files, paths, tokenizer, sequence_length, **options)
    asked = {name: options.get(name, usual) for name, usual in ENCODING.items()}
    told = tokenizer.told()
    name = name_of([Path(path) for path in paths], tokenizer, told, sequence_length, asked)
    if not name:
        return encode()
    if (found := whole(name, options.get("on_bad_row", "error"))) is not None:
        return found
    if (store := begun(name, paths)) is None:
        return encode()
    try:
        found = store.finish(encode(store=store))
        if tokenizer.told() != told:  # midnight came in between: what is mapped stays, for this process
            shutil.rmtree(store.folder, ignore_errors=True)
        return found
    except OSError as error:  # most likely a full disk
        log.warning("encoded rows are not kept in %s, the next start encodes them again: %s", root(), error)
        # packed files hold more than text_bytes supposed: what is written says how much
        large = store.written > BYTES_A_BYTE * options.get("held_bytes", HELD_BYTES)
        return encode(held_bytes=0) if large else encode()
    finally:
        store.discard()


def whole(name: str, on_bad_row: str) -> Dataset | None:
    """A whole store that may be used: whether bad rows are skipped changes nothing where there are none."""
    found = read(name)
    return None if found is not None and found.stats.bad and on_bad_row == "error" else found


def begun(name: str, paths: Sequence[str | Path]) -> Writing | None:
    """A new store; None where none can be written, or it would take more than half of what is free."""
    try:
        needed, free = BYTES_A_BYTE * _size(paths), shutil.disk_usage(made(root())).free
        return Writing(name, free // 2) if 2 * needed <= free else None
    except OSError:
        return None


def _size(paths: Sequence[str | Path]) -> int:
    return sum(text_bytes(Path(path)) for path in paths)


def made(folder: Path) -> Path:
    """The folder, made if need be. Others may not look into it: rows can be private."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def root() -> Path:
    """The folder of all stores."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unfreeze" / "encoded"


def name_of(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    told: str | None,
    sequence_length: int,
    asked: Mapping[str, object],
) -> str:
    """The store of rows that are encoded as `asked` (ENCODING); "" where they are not to be kept.

    told: Tokenizer.told before the first row
    """
    if told is None:
        return ""
    return key(paths, tokenizer.identity, {"length": sequence_length, "told": told, **asked})


def key(paths: Sequence[Path], tokenizer: str, options: Mapping[str, object]) -> str:
    """What the encoded rows are a function of, as 32 hex digits; "" where they are not to be kept.

    tokenizer: Tokenizer.identity; "" where it is not known
    """
    if not tokenizer or not all(path.is_file() for path in paths):
        return ""
    if _size(paths) < LEAST_BYTES:
        return ""
    found = [path.stat() for path in paths]
    files = [
        (str(path.resolve()), file.st_size, file.st_mtime_ns, file.st_ctime_ns)
        for path, file in zip(paths, found, strict=True)
    ]
    made_of = json.dumps([files, tokenizer, sorted(options.items()), _code()])
    return hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()


def _version_of(library: str) -> str:
    """The version of a library, "" where it is not installed."""
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
    """A store that is being written. What was added can be read.

    It gets its name once it is whole, so that no other process sees half of it.
    """

    reading: Reading = "disk"

    def __init__(self, name: str, most: float = math.inf):
        """most: bytes of tokens and weights; beyond, `add` raises OSError (sizes of files are estimates)."""
        self.written, self._most = 0, most
        self.folder = root() / name
        self._part = root() / f".{name}.{os.getpid()}"
        shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir()
        self._files = [(self._part / name).open("wb") for name in ("tokens", "weights")]
        super().__init__(Columns(), *(Span((self._part / name).open("rb")) for name in ("tokens", "weights")))

    def add(self, part: EncodedRows) -> None:
        """Raises OSError where they can't be written; those before stay readable."""
        self.written += len(part.tokens) + len(part.weights)
        if self.written > self._most:
            raise OSError(errno.ENOSPC, "they take more than half of what the disk had free")
        for file, content in zip(self._files, (part.tokens, part.weights), strict=True):
            file.write(content)
            file.flush()
        self._grow(part.columns)
        self.columns.extend(part.columns)

    def finish(self, dataset: Dataset) -> Dataset:
        """The same dataset, its documents in the same order, read from the store.

        Raises OSError where it can't be written.
        """
        for file in self._files:
            file.close()
        starts_N = np.array(self._starts_N, dtype=np.int64)[dataset.examples.places_N]
        for name, bytes_ in {**dataset.examples.columns(), "starts": starts_N.tobytes()}.items():
            (self._part / name).write_bytes(bytes_)
        account = {"stats": dataset.stats.as_dict(), "columns": _columns_hash(self._part)}
        (self._part / "account.json").write_text(json.dumps(account), encoding="utf-8")
        with suppress(OSError):  # another process was faster: its store has the same content
            self._part.rename(self.folder)
        make_room(self.folder)
        if (found := read(self.folder.name)) is None:
            raise FileNotFoundError(self.folder)
        return found

    def discard(self) -> None:
        """Remove what was written, where it is not whole. This process can read it to its end."""
        for file in self._files:
            with suppress(OSError):  # of a full disk: what is still in a buffer
                file.close()
        shutil.rmtree(self._part, ignore_errors=True)


class Span:
    """Bytes of a file; a slice of them is read when it is asked for."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def __getitem__(self, place: slice) -> bytes:
        self._file.seek(place.start)
        return self._file.read(place.stop - place.start)


def read(name: str) -> Dataset | None:
    """A whole store; None where there is none.

    A damaged one is removed, to be made anew.
    """
    folder = root() / name
    if not folder.is_dir():
        return None
    try:
        account = json.loads((folder / "account.json").read_text(encoding="utf-8"))
        stats = stats_of(account["stats"])
        if account["columns"] != _columns_hash(folder):
            raise ValueError("other columns than were written")
        documents = _Mapped(folder, stats)
        with suppress(OSError):  # a cache that can't be written can be read
            os.utime(folder / "account.json")  # when it was last read
        return Dataset(Examples(documents.fetch, documents.columns), stats)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    except OSError as error:  # no memory or file handle is left: that says nothing of the store
        log.warning("encoded rows in %s cannot be read now and are encoded again: %s", folder, error)
        return None


def make_room(newest: Path, kept: int = KEPT_BYTES) -> None:
    """Remove the stores that were not read for longest, until `kept` bytes are left; never `newest`."""
    folders = sorted(root().iterdir())
    for part in (folder for folder in folders if folder.name.startswith(".")):
        with suppress(OSError):  # another process removes or finishes it
            written = max(file.stat().st_mtime for file in (part, *part.iterdir()))
            if time.time() - written > ABANDONED:
                shutil.rmtree(part, ignore_errors=True)
    stores: list[tuple[float, int, Path]] = []
    for folder in (folder for folder in folders if not folder.name.startswith(".")):
        with suppress(OSError):  # another process removes too
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
    """Documents of a store; the system reads a page when it is asked for, and can forget it."""

    def __init__(self, folder: Path, stats: Stats):
        columns, starts_N = _columns(folder), np.frombuffer(_map(folder / "starts"), dtype=np.int64)
        super().__init__(columns, _map(folder / "tokens"), _map(folder / "weights"), starts_N)
        self._folder = folder
        num_tokens = int(np.frombuffer(columns.numbers, dtype=np.int64)[::NUMBERS].sum())
        whole = len(self._tokens) == len(self._weights) == 4 * num_tokens
        if not whole or len(starts_N) != stats.examples:
            raise ValueError("fewer tokens than were written")

    def fetch(self, index: int) -> Example:
        """Document `index`. Raises DataError where its tokens are not those that were written."""
        example = super().fetch(index)
        if example.checksum != bytes(self.columns.checksums[16 * index : 16 * index + 16]):
            shutil.rmtree(self._folder, ignore_errors=True)
            raise DataError(
                f"{self._folder}: encoded row {example.row} is damaged on disk; the folder was removed",
                next="run the same command again: the rows are encoded anew",
            )
        return example


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _columns(folder: Path) -> Any:
    """The Columns of a store, mapped."""
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
