"""Read rows from data files, one at a time, in any supported format.

    .jsonl .json       JSON Lines, or one JSON array               lines.py
    .txt               documents                                   lines.py
    .csv .tsv          a table with a header line                  tables.py
    .parquet .arrow .feather   tables, with pyarrow                tables.py
    ….gz ….zst         any of the first four, compressed with gzip or zstd       packed.py

Every error names the row (its line in the file) and the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import SEEK_END
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from unfreeze.core.errors import DataError, nearest
from unfreeze.core.units import format_bytes
from unfreeze.data.rows import lines
from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.data.rows.columns import renames_of
from unfreeze.data.rows.judged import judged_from_dict
from unfreeze.data.rows.lines import JsonArray, JsonLines, TextFile, is_array, parse_json, parse_text
from unfreeze.data.rows.packed import PACKINGS, is_packed
from unfreeze.data.rows.row import Answers, BadRow, Build, Judged, Row, RowPlace
from unfreeze.data.rows.shapes import row_from_dict
from unfreeze.data.rows.tables import Arrow, Csv, Parquet, parse_cells

PACKED = 4
"""Approximate bytes of text per byte of gzip or zstd."""

BUILD: dict[Answers, Build] = {"taught": row_from_dict, "asked": asked_from_dict}


class Reader(Protocol):
    """Yields the raw rows of one file; `parser` interprets them."""

    def rows(self) -> Iterator[tuple[RowPlace, Any]]: ...
    def at(self, place: RowPlace) -> Any: ...


Renames = Mapping[str, str]
Open = Callable[[Path, Renames], Reader]
Parse = Callable[[Any, int, Renames, Build], Any]


def _json(path: Path, renames: Renames) -> Reader:
    return JsonArray(path, renames) if is_array(path) else JsonLines(path, renames)


FORMS: dict[str, tuple[Open, Parse]] = {
    ".jsonl": (_json, parse_json),
    ".json": (_json, parse_json),
    ".ndjson": (_json, parse_json),
    ".txt": (TextFile, parse_text),
    ".csv": (Csv, parse_cells),
    ".tsv": (Csv, parse_cells),
    ".parquet": (Parquet, parse_cells),
    ".arrow": (Arrow, parse_cells),
    ".feather": (Arrow, parse_cells),
}
WHOLE: dict[str, type[Csv] | type[Parquet] | type[Arrow]] = {
    ".csv": Csv,
    ".tsv": Csv,
    ".parquet": Parquet,
    ".arrow": Arrow,
    ".feather": Arrow,
}
"""Tables, of which some or all columns are read."""
TABLES = (".parquet", ".arrow", ".feather")
"""Formats that hold their own compression, and rows without bytes of their own."""
UNPACK = {".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}


def ending(path: Path) -> str:
    """Return the extension that determines a file's format: ".jsonl" for chat.jsonl.gz."""
    return Path(path.stem).suffix.lower() if is_packed(path) else path.suffix.lower()


def is_data(path: Path) -> bool:
    """Return True if a file's extension is supported."""
    packed = is_packed(path) and ending(path) in TABLES
    return ending(path) in FORMS and not packed


def refuse_form(path: Path) -> None:
    """Raise DataError for an unsupported file extension."""
    if not is_data(path):
        unpack = UNPACK.get(path.suffix.lower())
        raise DataError(
            f"{path.name}: extension {path.suffix!r} is not supported",
            next=f"{unpack} {path}" if unpack else f"convert it to one of {' '.join(FORMS)}",
        )


def reader(path: str | Path, columns: Sequence[str] = ()) -> Reader:
    """Return the reader for a file's format. `columns`: see columns.py.

    Raises DataError for a missing file, an unknown format, or a table without any known column.
    """
    path = Path(path)
    _refuse_file(path)
    return FORMS[ending(path)][0](path, renames_of(columns))


def whole_reader(path: Path) -> Reader:
    """Return a reader like `reader`, which reads every column of a table, known or not."""
    _refuse_file(path)
    table = WHOLE.get(ending(path))
    return table(path, {}, whole=True) if table else FORMS[ending(path)][0](path, {})


def _refuse_file(path: Path) -> None:
    """Raise DataError for a missing file or one of another format than its name says."""
    if not path.is_file():
        raise DataError(
            f"no data file at {path}{nearest(path.name, _neighbours(path))}", next="--data FILE.jsonl"
        )
    refuse_form(path)
    _refuse_other(path)


BEGINS = {
    b"PAR1": ".parquet",
    b"ARROW1\0\0": ".arrow",
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".xlsx",
}
"""Magic bytes of non-text files. A Parquet file also ends with its magic bytes."""
CONTROLS = frozenset(range(32)) - frozenset(b"\t\n\f\r\x1b")
"""Bytes that do not belong in a text, except by accident."""
BINARY = 0.02
"""Share of CONTROLS in a file's first bytes above which it is not text. Random bytes have 0.1."""


def _refuse_other(path: Path) -> None:
    """Raise DataError if a text file's first bytes show another format."""
    if ending(path) in TABLES or is_packed(path):
        return
    with path.open("rb") as file:
        first = file.read(4096)
        file.seek(-min(4, path.stat().st_size), SEEK_END)
        last = file.read(4)
    kind = next((kind for begin, kind in BEGINS.items() if first.startswith(begin)), None)
    if kind == ".parquet" and last != b"PAR1":
        return
    if kind == ".xlsx":
        raise DataError(
            f"{path.name} is an xlsx or zip file, judging by its first bytes",
            next="save it as CSV UTF-8, or unzip it",
        )
    if kind:
        named = path.with_name(f"{path.name}{kind}" if kind in PACKINGS else f"{path.stem}{kind}")
        raise DataError(
            f"{path.name} is {kind}, not {path.suffix}, judging by its first bytes",
            next=f"mv {quote(str(path))} {quote(str(named))}",
        )
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16: refused when its rows are read
        return
    odd = [at for at, byte in enumerate(first) if byte in CONTROLS]
    if len(odd) > max(1, BINARY * len(first)) or first.count(0) > 2:  # one NUL may just be a damaged row
        raise DataError(
            f"{path.name} is a binary file, not text: byte {odd[0] + 1} is 0x{first[odd[0]]:02x}",
            next="give rows as text (.jsonl, .csv, .txt), or as .parquet or .arrow",
        )


def read_rows(
    path: str | Path,
    on_bad: Callable[[BadRow], None] | None = None,
    columns: Sequence[str] = (),
    answers: Answers = "taught",
) -> Iterator[Any]:
    """Yield the rows of a data file (Row, or Judged depending on `answers`), one at a time.

    The file is never in memory as a whole.

    A bad row raises DataError. With `on_bad` it is passed there instead and reading continues (count these
    rows, so that none is lost silently).
    """
    return (row for _, row in read_places(path, on_bad, columns, answers))


def read_places(
    path: str | Path,
    on_bad: Callable[[BadRow], None] | None = None,
    columns: Sequence[str] = (),
    answers: Answers = "taught",
) -> Iterator[tuple[RowPlace, Any]]:
    """Yield rows like read_rows, each with its place, from which Again can read it.

    At most one row (MAX_ROW_BYTES) is in memory; for tables, ROWS rows.
    """
    path = Path(path)
    rows, parse = raw_rows(path, columns), parser(path, columns, answers)
    for place, raw in rows:
        try:
            yield place, parse(raw, place)
        except DataError as error:
            if on_bad is None:
                raise refused(path, error) from None
            on_bad(BadRow(place.row, error.message))


def raw_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[tuple[RowPlace, Any]]:
    """Yield each raw row of a file with its place: the only part that one process must do in order.

    A raw row is bytes or a dict of plain values, so `parser` can run in another process.
    """
    return reader(path, columns).rows()


def parser(
    path: Path, columns: Sequence[str] = (), answers: Answers = "taught"
) -> Callable[[Any, RowPlace], Any]:
    """Return a function that turns one of raw_rows into a Row or a Judged; it does not open the file.

    It raises DataError naming the row.
    """
    refuse_form(path)
    parse, renames = FORMS[ending(path)][1], renames_of(columns)
    build: Build = BUILD.get(answers, judged_from_dict)

    def bounded(raw: Any, place: RowPlace) -> Row | Judged:
        if place.size > lines.MAX_ROW_BYTES:
            raise DataError(
                f"row {place.row}: the row has {format_bytes(place.size)}, the limit is"
                f" {format_bytes(lines.MAX_ROW_BYTES)}; is a line break missing?"
            )
        return parse(raw, place.row, renames, build)

    return bounded


def refused(path: Path, error: DataError) -> DataError:
    """Add the file's name and a next step to a bad row's error."""
    return DataError(
        f"{path.name}, {error.message}", next=error.next or "correct the row, or --data.on-bad-row skip"
    )


class Again:
    """Re-read rows of a file by their places."""

    def __init__(self, path: Path, columns: Sequence[str] = (), answers: Answers = "taught"):
        self._reader, self._parse = reader(path, columns), parser(path, columns, answers)

    def __call__(self, place: RowPlace) -> Any:
        """Read one row again. Raises DataError if the file has changed and has no row there."""
        return self._parse(self._reader.at(place), place)


def text_bytes(path: Path) -> int:
    """Return the approximate size of a file's text in bytes, uncompressed."""
    size = path.stat().st_size
    return PACKED * size if path.suffix.lower() in (*PACKINGS, ".parquet") else size


def _neighbours(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
