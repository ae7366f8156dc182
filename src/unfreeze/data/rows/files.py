"""Data files to rows, one after the other: JSON Lines (shapes.py), or plain text.

Every complaint names the row (its line in the file) and the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from unfreeze.core.errors import DataError, nearest
from unfreeze.core.units import format_bytes
from unfreeze.data.rows.fields import json_type, refuse_constant
from unfreeze.data.rows.row import BadRow, Place, Row, Text
from unfreeze.data.rows.shapes import row_from_dict

DOCUMENT_MARK = "<|endoftext|>"
"""A line that holds only this separates the documents of a .txt file (the TinyStories convention)."""

MAX_ROW_BYTES = 64 * 2**20
"""A longer line (or document of a text file) is a bad row: it bounds what reading holds in memory. 64 MiB are
some 16 million tokens."""


def read_rows(path: str | Path, on_bad: Callable[[BadRow], None] | None = None) -> Iterator[Row]:
    """The rows of a .jsonl (or .json) or .txt file, one after the other; the file is never held whole.

    A bad row raises DataError; with `on_bad` it is handed over instead and reading goes on (count them:
    nothing may vanish).
    .txt: documents are separated by lines `<|endoftext|>` if the file has any, else by blank lines.
    """
    return (row for _, row in read_places(path, on_bad))


def read_places(
    path: str | Path, on_bad: Callable[[BadRow], None] | None = None
) -> Iterator[tuple[Place, Row]]:
    """Read rows as read_rows does, each with its place, by which read_at finds it again.

    At most one row (MAX_ROW_BYTES) is held.
    """
    path = Path(path)
    parse = parser(path)
    for place, raw in raw_rows(path):
        try:
            yield place, parse(raw, place)
        except DataError as error:
            if on_bad is None:
                raise refused(path, error) from None
            on_bad(BadRow(place.row, error.message))


def raw_rows(path: Path) -> Iterator[tuple[Place, bytes]]:
    """The bytes of each row, and where they lie: all that one process has to read in order.

    What they mean can be found out elsewhere, by `parser`.
    """
    if not path.is_file():
        raise DataError(
            f"no data file at {path}{nearest(path.name, _neighbours(path))}", next="--data FILE.jsonl"
        )
    if path.suffix not in (".jsonl", ".json", ".txt"):
        raise DataError(
            f"{path.name}: ending {path.suffix!r} is not read; .jsonl (one JSON object per line) or .txt"
        )
    with path.open("rb") as file:
        yield from _documents(file, path) if path.suffix == ".txt" else _lines(file, path)


def parser(path: Path) -> Callable[[bytes, Place], Row]:
    """What makes a Row of the bytes of one. It raises DataError that names the row."""
    parse = _parse_text if path.suffix == ".txt" else _parse_json

    def bounded(raw: bytes, place: Place) -> Row:
        if place.size > MAX_ROW_BYTES:
            raise DataError(
                f"row {place.row}: {format_bytes(place.size)} in one row, at most"
                f" {format_bytes(MAX_ROW_BYTES)}; is a line break missing?"
            )
        return parse(raw, place.row)

    return bounded


def refused(path: Path, error: DataError) -> DataError:
    """A bad row's error with the name of its file and what to do."""
    return DataError(f"{path.name}, {error.message}", next=error.next or "mend the row, or --on-bad-row skip")


def read_at(file: IO[bytes], path: Path, place: Place) -> Row:
    """One row again, from the file opened for reading bytes.

    Raises DataError if the file has changed and holds no row there.
    """
    file.seek(place.offset)
    return parser(path)(file.read(place.size), place)


def _neighbours(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []


def _bounded_lines(file: IO[bytes], path: Path) -> Iterator[tuple[Place, bytes]]:
    """Give (place, bytes) of each line, without a byte order mark.

    Split at \n only: U+2028 and its kin may stand inside JSON strings.
    Of a line longer than MAX_ROW_BYTES only the beginning is given; its size is the true one.
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
            whole = _without_bom(line, path)
            mark = len(line) - len(whole)
        yield Place(number, offset + mark, size - mark), whole
        offset += size


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[Place, bytes]]:
    """The lines that are not blank."""
    return ((place, line) for place, line in _bounded_lines(file, path) if line.strip())


def _documents(file: IO[bytes], path: Path) -> Iterator[tuple[Place, bytes]]:
    """(place, bytes) of each document of a text file; its row is its first line's."""
    mark = DOCUMENT_MARK.encode()
    marked = any(line.strip() == mark for _, line in _bounded_lines(file, path))
    file.seek(0)
    first: Place | None = None
    lines: list[bytes] = []
    size = 0
    for place, line in _bounded_lines(file, path):
        ends = line.strip() == mark if marked else not line.strip()
        if ends or (first is None and not line.strip()):
            if first is not None:
                yield Place(first.row, first.offset, size), b"".join(lines)
            first, lines, size = None, [], 0
            continue
        first = first or place
        size += place.size
        if size <= MAX_ROW_BYTES:
            lines.append(line)
    if first is not None:
        yield Place(first.row, first.offset, size), b"".join(lines)


def _without_bom(line: bytes, path: Path) -> bytes:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{path.name} is UTF-16; UTF-8 is read",
            next=f"iconv -f UTF-16 -t UTF-8 {path} > utf8{path.suffix}",
        )
    return line.removeprefix(b"\xef\xbb\xbf")


def _decode(raw: bytes, row: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"row {row}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8"
        ) from None


def _parse_text(raw: bytes, row: int) -> Row:
    return Text(_decode(raw, row).strip(), row)


def _parse_json(raw: bytes, row: int) -> Row:
    text = _decode(raw, row)
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        if row == 1 and text.lstrip().startswith("["):
            raise DataError(
                "row 1: this is a JSON array, not one object per line",
                next="jq -c '.[]' data.json > data.jsonl",
            ) from None
        raise DataError(
            f"row {row}: broken JSON at column {min(error.pos, len(text.rstrip())) + 1}: {error.msg}"
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # duplicate keys, NaN, numbers of thousands of digits, endless nesting
        raise DataError(f"row {row}: broken JSON: {str(error) or type(error).__name__}") from None
    if not isinstance(value, dict):
        hint = "jq -c '.[]' data.json > data.jsonl" if isinstance(value, list) else ""
        raise DataError(f"row {row}: expected a JSON object, got {json_type(value)}", next=hint)
    return row_from_dict(value, row)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {twice!r} stands twice")
    return result
