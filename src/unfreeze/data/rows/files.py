"""Data files to rows, one after the other, in whichever form they are.

    .jsonl .json       JSON Lines, or one JSON array               lines.py
    .txt               documents                                   lines.py
    .csv .tsv          a table with a header line                  tables.py
    .parquet .arrow .feather   tables, with pyarrow                tables.py
    ….gz               any of the first four, packed with gzip

Every complaint names the row (its line in the file) and the field.
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
from unfreeze.data.rows.row import Answers, BadRow, Build, Judged, Row, RowPlace
from unfreeze.data.rows.shapes import row_from_dict
from unfreeze.data.rows.tables import Arrow, Csv, Parquet, parse_cells

PACKED = 4
"""Bytes of text in a byte of gzip, about."""

BUILD: dict[Answers, Build] = {"taught": row_from_dict, "asked": asked_from_dict}


class Reader(Protocol):
    """The rows of one file as they stand in it; what they mean is found out by `parser`."""

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
UNPACK = {".zst": "zstd -d", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}


def ending(path: Path) -> str:
    """The ending that says a file's form: ".jsonl" of chat.jsonl.gz."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def is_data(path: Path) -> bool:
    """Whether a file's ending is one that is read."""
    packed = path.suffix.lower() == ".gz" and ending(path) in (".parquet", ".arrow", ".feather")
    return ending(path) in FORMS and not packed


def refuse_form(path: Path) -> None:
    """Raise DataError for a file whose ending is not read."""
    if not is_data(path):
        unpack = UNPACK.get(path.suffix.lower())
        raise DataError(
            f"{path.name}: ending {path.suffix!r} is not read",
            next=f"{unpack} {path}" if unpack else f"write it as one of {' '.join(FORMS)}",
        )


def reader(path: str | Path, columns: Sequence[str] = ()) -> Reader:
    """The reader of a file's form. `columns`: see columns.py.

    Raises DataError for a file that is absent, of no known form, or a table without a known column.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"no data file at {path}{nearest(path.name, _neighbours(path))}", next="--data FILE.jsonl"
        )
    refuse_form(path)
    _refuse_other(path)
    return FORMS[ending(path)][0](path, renames_of(columns))


BEGINS = {b"PAR1": ".parquet", b"ARROW1\0\0": ".arrow", b"\x1f\x8b": ".gz", b"PK\x03\x04": ".xlsx"}
"""First bytes of files that are no text. A Parquet file ends as it begins."""
CONTROLS = frozenset(range(32)) - frozenset(b"\t\n\f\r\x1b")
"""Bytes that no text holds, but for a slip."""
BINARY = 0.02
"""Share of a file's first bytes that are CONTROLS, from which on it is no text. Of random bytes it is 0.1."""


def _refuse_other(path: Path) -> None:
    """Raise DataError for a text file that is not one by its first bytes."""
    if ending(path) in (".parquet", ".arrow", ".feather") or path.suffix.lower() == ".gz":
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
            f"{path.name} is a packed file (xlsx or zip) by its first bytes",
            next="save it as CSV UTF-8, or unzip it",
        )
    if kind:
        named = path.with_name(f"{path.name}.gz" if kind == ".gz" else f"{path.stem}{kind}")
        raise DataError(
            f"{path.name} is {kind} by its first bytes, not {path.suffix}",
            next=f"mv {quote(str(path))} {quote(str(named))}",
        )
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16, refused where its rows are read
        return
    odd = [at for at, byte in enumerate(first) if byte in CONTROLS]
    if len(odd) > max(1, BINARY * len(first)) or first.count(0) > 2:  # one NUL may be a damaged row
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
    """The rows of a data file (Row; Judged where `answers` says so), one after the other.

    The file is never held whole.

    A bad row raises DataError; with `on_bad` it is handed over instead and reading goes on (count them:
    nothing may vanish).
    """
    return (row for _, row in read_places(path, on_bad, columns, answers))


def read_places(
    path: str | Path,
    on_bad: Callable[[BadRow], None] | None = None,
    columns: Sequence[str] = (),
    answers: Answers = "taught",
) -> Iterator[tuple[RowPlace, Any]]:
    """Read rows as read_rows does, each with its place, by which Again finds it.

    At most one row (MAX_ROW_BYTES) is held, of a table ROWS of them.
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
    """Each row as it stands in its file, and its place: all that one process has to read in order.

    What it means can be found out elsewhere, by `parser`: it is bytes, or a dict of plain values.
    """
    return reader(path, columns).rows()


def parser(
    path: Path, columns: Sequence[str] = (), answers: Answers = "taught"
) -> Callable[[Any, RowPlace], Any]:
    """What makes a Row, or a Judged, of one of raw_rows; the file is not opened.

    It raises DataError that names the row.
    """
    refuse_form(path)
    parse, renames = FORMS[ending(path)][1], renames_of(columns)
    build: Build = BUILD.get(answers, judged_from_dict)

    def bounded(raw: Any, place: RowPlace) -> Row | Judged:
        if place.size > lines.MAX_ROW_BYTES:
            raise DataError(
                f"row {place.row}: {format_bytes(place.size)} in one row, at most"
                f" {format_bytes(lines.MAX_ROW_BYTES)}; is a line break missing?"
            )
        return parse(raw, place.row, renames, build)

    return bounded


def refused(path: Path, error: DataError) -> DataError:
    """A bad row's error with the name of its file and what to do."""
    return DataError(
        f"{path.name}, {error.message}", next=error.next or "mend the row, or --data.on-bad-row skip"
    )


class Again:
    """Rows of a file that were read before, by their places."""

    def __init__(self, path: Path, columns: Sequence[str] = (), answers: Answers = "taught"):
        self._reader, self._parse = reader(path, columns), parser(path, columns, answers)

    def __call__(self, place: RowPlace) -> Any:
        """Raises DataError if the file has changed and holds no row there."""
        return self._parse(self._reader.at(place), place)


def text_bytes(path: Path) -> int:
    """Bytes of text in a file, about: unpacked."""
    size = path.stat().st_size
    return PACKED * size if path.suffix.lower() in (".gz", ".parquet") else size


def _neighbours(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
