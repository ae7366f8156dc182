"""Output files: JSON lines in order, a new file after a number of bytes; read again once written."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path
from typing import IO, Any, cast

from unfreeze.data.rows.packed import needs_zstandard, open_bytes

ENDING = {"none": "", "gz": ".gz", "zst": ".zst"}


class Shards:
    """Writes rows-00000.jsonl, rows-00001.jsonl, … into a folder.

    Compressed files hold neither a time nor a name, so the same rows give the same bytes.
    """

    def __init__(self, folder: Path, compression: str, shard_bytes: int):
        self._folder, self._compression, self._most = folder, compression, shard_bytes
        self._paths: list[Path] = []
        self._file: IO[bytes] | None = None
        self._raw: IO[bytes] | None = None
        self._size = 0

    def write(self, line: bytes) -> None:
        """Write a row; a row is never divided."""
        if self._file is None or self._size >= self._most:
            self._open()
        assert self._file is not None
        self._file.write(line)
        self._size += len(line)

    def _open(self) -> None:
        self.close()
        name = f"rows-{len(self._paths):05d}.jsonl{ENDING[self._compression]}"
        self._paths.append(self._folder / name)
        self._raw, self._size = self._paths[-1].open("wb"), 0
        if self._compression == "gz":
            packed: Any = gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=self._raw, mtime=0)
        elif self._compression == "zst":
            library = needs_zstandard("compression = zst")
            packed = library.ZstdCompressor(level=3).stream_writer(self._raw, closefd=False)
        else:
            packed = self._raw
        self._file = cast("IO[bytes]", packed)

    def close(self) -> None:
        """Close the current file; it is on the disk then."""
        if self._file is None or self._raw is None:
            return
        if self._file is not self._raw:
            self._file.close()
        self._raw.flush()
        os.fsync(self._raw.fileno())
        self._raw.close()
        self._file = self._raw = None

    def read_again(self) -> list[dict[str, Any]]:
        """Name, rows, bytes before compression and SHA-256 of each file, from the files themselves."""
        self.close()
        return [_measured(path) for path in self._paths]


def _measured(path: Path) -> dict[str, Any]:
    rows = size = 0
    with open_bytes(path) as file:
        while block := file.read(2**20):
            rows, size = rows + block.count(b"\n"), size + len(block)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "documents": rows, "bytes": size, "sha256": digest}
