"""Files compressed with gzip or zstd, read as if they were not. zstd needs the library zstandard."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any, cast

from unfreeze.core.errors import DataError

PACKINGS = {".gz": "gzip", ".zst": "zstd"}
"""Last extension -> the format's name."""
CHUNK = 1024
"""Compressed bytes read at a time: a zstd block has at least 4 bytes and at most 128 KiB of content, so this
is at most 32 MiB in memory, whatever the file holds."""


class Damaged(ValueError):
    """A zstd file that is cut or not zstd."""


BROKEN = (gzip.BadGzipFile, EOFError, zlib.error, Damaged)
"""Errors of reading a damaged compressed file."""


def is_packed(path: Path) -> bool:
    """Return True if the name ends in .gz or .zst."""
    return path.suffix.lower() in PACKINGS


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading bytes; decompress it if its name ends in .gz or .zst."""
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if path.suffix.lower() == ".zst":
        return cast(IO[bytes], io.BufferedReader(_Zstd(path), 2**18))
    return path.open("rb")


def unpacked_size(path: Path) -> int:
    """Return a file's bytes before compression, counted by reading a compressed one."""
    if not is_packed(path):
        return path.stat().st_size
    with open_bytes(path) as file:
        return sum(map(len, iter(lambda: file.read(2**20), b"")))


def needs_zstandard(what: str) -> Any:
    """Return the module zstandard, or raise DataError saying how to install it."""
    try:
        import zstandard  # an optional dependency
    except ImportError:
        raise DataError(
            f"{what}: zstd needs the library zstandard, which is not installed", next="pip install zstandard"
        ) from None
    return zstandard


class _Zstd(io.RawIOBase):
    """Content of a zstd file of any number of frames. Seeking backward decompresses again from the start."""

    def __init__(self, path: Path):
        self._zstandard = needs_zstandard(path.name)
        self._file = path.open("rb")
        self._begin()

    def _begin(self) -> None:
        self._file.seek(0)
        self._frame: Any = None  # None between frames
        self._packed, self._content, self._at = b"", b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position counted from the start or from here."""
        if whence not in (io.SEEK_SET, io.SEEK_CUR):
            raise io.UnsupportedOperation("a zstd file has no known end")
        to = offset + (self._at if whence == io.SEEK_CUR else 0)
        if to < self._at:
            self._begin()
        while self._at < to and (read := self._take(min(2**20, to - self._at))):
            self._at += len(read)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; 0 at the end. Raises Damaged for a file that is cut or not zstd."""
        read = self._take(len(buffer))
        buffer[: len(read)] = read
        self._at += len(read)
        return len(read)

    def _take(self, count: int) -> bytes:
        while not self._content:
            self._packed = self._packed or self._file.read(CHUNK)
            if not self._packed:
                if self._frame is not None:
                    raise Damaged("the file ends inside a zstd frame")
                return b""
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._content = self._frame.decompress(self._packed)
            except self._zstandard.ZstdError as error:
                raise Damaged(str(error)) from None
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        taken, self._content = self._content[:count], self._content[count:]
        return taken

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()
