"""Rows that are lines of a file: JSON Lines, plain text, and elements of a JSON array. Gzip and zstd are
decompressed (packed.py).

A line is located by its bytes (RowPlace), so it can be read again later and parsed in another process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from unfreeze.core.errors import DataError
from unfreeze.core.units import format_bytes
from unfreeze.data.rows.columns import renamed
from unfreeze.data.rows.fields import json_type, refuse_constant
from unfreeze.data.rows.packed import BROKEN, PACKINGS, open_bytes
from unfreeze.data.rows.row import Build, RowPlace, Text
from unfreeze.data.rows.shapes import row_from_dict
from unfreeze.untrusted.json_object import is_object

DOCUMENT_MARK = "<|endoftext|>"
"""A line with only this separates the documents of a .txt file (the TinyStories convention)."""

MAX_ROW_BYTES = 64 * 2**20
"""A longer line (or text document) is a bad row; this bounds the reader's memory. 64 MiB are about 16 million
tokens."""
CHUNK = 2**18
"""Bytes of a JSON array to read at a time."""


class JsonLines:
    """One JSON object per line; blank lines are skipped."""

    def __init__(self, path: Path, renames: Mapping[str, str]):
        self.path = path
        self._file: IO[bytes] | None = None

    def rows(self) -> Iterator[tuple[RowPlace, bytes]]:
        """Yield (place, bytes) of each row."""
        with open_lines(self.path) as file:
            yield from (line for line in bounded_lines(file, self.path) if line[1].strip())

    def at(self, place: RowPlace) -> bytes:
        """Read the bytes of one row again."""
        if self._file is None:
            self._file = open_bytes(self.path)
        self._file.seek(place.offset)
        return self._file.read(place.size)


class TextFile(JsonLines):
    """Documents separated by lines `<|endoftext|>` if the file has any, else by blank lines."""

    def rows(self) -> Iterator[tuple[RowPlace, bytes]]:
        """Yield (place, bytes) of each document; its row number is that of its first line."""
        mark = DOCUMENT_MARK.encode()
        with open_lines(self.path) as file:
            marked = any(line.strip() == mark for _, line in bounded_lines(file, self.path))
            file.seek(0)
            first: RowPlace | None = None
            lines: list[bytes] = []
            size = 0
            for place, line in bounded_lines(file, self.path):
                ends = line.strip() == mark if marked else not line.strip()
                if ends or (first is None and not line.strip()):
                    if first is not None:
                        yield RowPlace(first.row, first.offset, size), b"".join(lines)
                    first, lines, size = None, [], 0
                    continue
                first = first or place
                size += place.size
                if size <= MAX_ROW_BYTES:
                    lines.append(line)
            if first is not None:
                yield RowPlace(first.row, first.offset, size), b"".join(lines)


_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\],]', re.DOTALL)
"""A whole JSON string, the opening quote of a string that is not yet read to its end, a bracket or a comma.
"""


class JsonArray(JsonLines):
    """The elements of one JSON array, `[{…}, {…}]`; a row's number is its index in the array, from 1.

    At most one element and CHUNK bytes are in memory.
    """

    def rows(self) -> Iterator[tuple[RowPlace, bytes]]:
        with open_lines(self.path) as file:
            head = without_bom(file.read(CHUNK), self.path)
            base = file.tell() - len(head)
            begin = head.index(b"[") + 1
            # `held`: unparsed bytes; `base`: their offset in the file; `start`: start of the element; `at`:
            # parsed so far
            held, base, start, at, depth, row = head[begin:], base + begin, 0, 0, 1, 0
            while True:
                for match in _TOKEN.finditer(held, at):
                    at = match.end()
                    token = match[0]
                    if token == b'"':
                        at = match.start()
                        break
                    if token in (b"{", b"["):
                        depth += 1
                    elif token in (b"}", b"]"):
                        depth -= 1
                    if depth == 0 or (depth == 1 and token == b","):
                        element = held[start : match.start()]
                        if row or depth or element.strip():
                            row += 1
                            yield RowPlace(row, base + start, len(element)), element
                        start = match.end()
                        if depth == 0:
                            _nothing_more(held[start:], file, self.path, row)
                            return
                else:
                    at = len(held)
                if len(held) - start > MAX_ROW_BYTES:
                    raise DataError(
                        f"{self.path.name}, row {row + 1}: more than {format_bytes(MAX_ROW_BYTES)} in one"
                        " row; is a bracket missing?"
                    )
                # a long string is scanned again with twice as many bytes, so total time stays linear
                more = file.read(max(CHUNK, len(held) - start))
                if not more:
                    raise DataError(
                        f"{self.path.name}, row {row + 1}: the file ends inside its JSON array",
                        next="download or write the file again",
                    )
                held, base, at, start = held[start:] + more, base + start, at - start, 0


def _nothing_more(rest: bytes, file: IO[bytes], path: Path, row: int) -> None:
    while not rest.strip() and (rest := file.read(CHUNK)):
        pass
    if rest.strip():
        raise DataError(
            f"{path.name}, row {row}: the JSON array ends here, but more follows: {rest.strip()[:20]!r}",
            next="one array per file, or one JSON object per line",
        )


def parse_json(raw: bytes, row: int, renames: Mapping[str, str], build: Build = row_from_dict) -> Any:
    """Parse a row of JsonLines or JsonArray."""
    return build(renamed(json_object(raw, row), renames, row), row, renames)


def parse_text(raw: bytes, row: int, renames: Mapping[str, str], build: Build = row_from_dict) -> Any:
    """Parse a row of a TextFile, which has no fields."""
    if build is not row_from_dict:
        return build({"text": decode(raw, row).strip()}, row, renames)
    return Text(decode(raw, row).strip(), row)


def is_array(path: Path) -> bool:
    """Return True if a JSON file starts with `[`."""
    with open_lines(path) as file:
        return without_bom(file.read(CHUNK), path).lstrip().startswith(b"[")


@contextmanager
def open_lines(path: Path) -> Generator[IO[bytes]]:
    """Open like open_bytes, but report a damaged compressed file as DataError."""
    with open_bytes(path) as file:
        try:
            yield file
        except BROKEN as error:
            raise DataError(
                f"{path.name} cannot be decompressed as {PACKINGS[path.suffix.lower()]}: {error}",
                next="download or write the file again",
            ) from None


def bounded_lines(file: IO[bytes], path: Path) -> Iterator[tuple[RowPlace, bytes]]:
    """Yield (place, bytes) of each line, without a byte order mark.

    Split at \n only: U+2028 and similar characters may occur inside JSON strings.
    A line longer than MAX_ROW_BYTES is truncated; its size is still the true one.
    """
    offset, number = 0, 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        size = len(line)
        while not line.endswith(b"\n") and size > MAX_ROW_BYTES and (rest := file.readline(MAX_ROW_BYTES)):
            size += len(rest)
            if rest.endswith(b"\n"):
                break
        whole, mark = line, 0
        if number == 1:
            whole = without_bom(line, path)
            mark = len(line) - len(whole)
        yield RowPlace(number, offset + mark, size - mark), whole
        offset += size


def without_bom(line: bytes, path: Path) -> bytes:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{path.name} is UTF-16; only UTF-8 is supported",
            next=f"iconv -f UTF-16 -t UTF-8 {path} > utf8{path.suffix}",
        )
    return line.removeprefix(b"\xef\xbb\xbf")


def decode(raw: bytes, row: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"row {row}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8",
            next="iconv -f WINDOWS-1252 -t UTF-8 FILE > utf8 (if it is from Windows),"
            " or --data.on-bad-row skip",
        ) from None


def json_object(raw: bytes, row: int) -> dict[str, Any]:
    """Parse the JSON object of a row."""
    text = decode(raw, row)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        over_lines = row == 1 and text.strip() == "{"
        raise DataError(
            f"row {row}: broken JSON at column {min(error.pos, len(text.rstrip())) + 1}: {error.msg}",
            next="one object a line: jq -c . FILE > rows.jsonl (if it is one object over several lines)"
            if over_lines
            else "",
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # duplicate keys, NaN, numbers with thousands of digits, endless nesting
        raise DataError(f"row {row}: broken JSON: {str(error) or type(error).__name__}") from None
    if not is_object(value):
        raise DataError(f"row {row}: expected a JSON object, got {json_type(value)}")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {twice!r} occurs twice")
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=refuse_constant)
"""Created once: json.loads would create one per row."""
