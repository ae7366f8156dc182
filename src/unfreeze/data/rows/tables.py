"""Rows of tables: csv (with a header line), Parquet, Arrow and Feather.

Only columns that a row can use are read, or all of them with whole=True. A nested value may be stored in a
column as JSON text. An empty or null cell is an absent field.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np

from unfreeze.core.errors import DataError
from unfreeze.data.rows import lines
from unfreeze.data.rows.columns import refuse_missing_columns, renamed
from unfreeze.data.rows.fields import json_of
from unfreeze.data.rows.row import Build, RowPlace
from unfreeze.data.rows.shapes import NAMES, check_names, row_from_dict
from unfreeze.untrusted.json_object import is_list, is_object

ROWS = 256
"""Number of rows of a Parquet file that are Python objects at a time."""
Cells = dict[str, Any]
"""The cells of a row by column name. Plain values, so they can be sent to another process."""
Wrong = tuple[str, str]
"""A record's error message, and what to do next."""
EXTRA = "pip install pyarrow"


_QUOTED = re.compile(r'"[^"]*"')


class _Swallowed(DataError):
    """A record that probably contains several: a quote meant as text opened a cell."""


class Csv:
    """Comma-separated values; semicolons and tabs are detected from the header line.

    A row's number is the line it starts on; the header is line 1. Quoted cells may contain line breaks.
    """

    def __init__(self, path: Path, renames: Mapping[str, str], *, whole: bool = False):
        self.path = path
        self._file: IO[bytes] | None = None
        with lines.open_lines(path) as file:
            first = next(lines.bounded_lines(file, path), None)
        if first is None or not first[1].strip():
            raise DataError(
                f"{path.name} is empty" if first is None else f"{path.name}, row 1: the header line is blank",
                next="a csv file starts with its column names: prompt,completion",
            )
        header = lines.decode(first[1], 1)
        bare = _QUOTED.sub("", header)
        self._delimiter = max(",;\t", key=bare.count) if path.suffix.lower() != ".tsv" else "\t"
        # header `prompt, completion`, then rows like `"a", "b"`: a quote after the space opens a cell
        self._spaced = self._delimiter != "\t" and f"{self._delimiter} " in bare
        self._names = self._record(header, 1)
        columns = [name for name in self._names if name]
        twice = next((name for name in columns if columns.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{path.name}, row 1: column {twice!r} occurs twice", next="rename one of them")
        if not whole:
            _check_header(path, columns, renames, "row 1: the first line of a csv file names its columns")

    def rows(self) -> Iterator[tuple[RowPlace, Cells | Wrong]]:
        """Yield the place of each record with its cells, or with its error."""
        csv.field_size_limit(lines.MAX_ROW_BYTES)
        with lines.open_lines(self.path) as file:
            counted = _Counted(lines.bounded_lines(file, self.path))
            records = self._reader(counted)
            next(records)
            while True:
                counted.begin()
                result: Cells | Wrong
                try:
                    if not (cells := next(records)):  # a blank line has no cells
                        continue
                    result = self._named_cells(cells, counted.row)
                except StopIteration:
                    return
                except _Swallowed:
                    raise
                except DataError as error:
                    result = error.message, error.next
                    if counted.open:
                        raise DataError(
                            f"{self.path.name}, {error.message}",
                            next="write the file again in UTF-8; the end of this record cannot be found",
                        ) from None
                except csv.Error as error:
                    if "end of data" in str(error) or "field limit" in str(error):
                        raise DataError(
                            f"{self.path.name}, row {counted.row}: a quote opened here is never closed",
                            next='close it; a quote inside a cell is written twice: ""',
                        ) from None
                    if counted.lines > 1:
                        raise DataError(
                            f"{self.path.name}, row {counted.row}: {error}; the end of this record cannot be"
                            " found",
                            next='a quote inside a cell is written twice: ""',
                        ) from None
                    result = f"row {counted.row}: {error}", 'quote the cell: "…"'
                yield RowPlace(counted.row, counted.offset, counted.size), result

    def _named_cells(self, cells: list[str], row: int) -> Cells:
        if self._delimiter == "\t" and any("\t" in cell and "\n" in cell for cell in cells):
            raise _Swallowed(
                f"{self.path.name}, row {row}: a cell that starts with a quote extends over tabs and line"
                " breaks; it may have swallowed the rows after it",
                next='double a quote that is text, and quote its cell: """Hello"" she said"',
            )
        if len(cells) != len(self._names):
            raise DataError(
                f"row {row}: {len(cells)} cells, the header has {len(self._names)}",
                next='quote a cell that contains a comma or a line break: "a, b"',
            )
        return {name: cell or None for name, cell in zip(self._names, cells, strict=True) if name}

    def at(self, place: RowPlace) -> Cells:
        """Read one record again."""
        if self._file is None:
            self._file = lines.open_bytes(self.path)
        self._file.seek(place.offset)
        text = lines.decode(self._file.read(place.size), place.row)
        return self._named_cells(self._record(text, place.row), place.row)

    def _reader(self, texts: Iterable[str]) -> Iterator[list[str]]:
        return csv.reader(texts, delimiter=self._delimiter, strict=True, skipinitialspace=self._spaced)

    def _record(self, text: str, row: int) -> list[str]:
        """Parse the cells of one record; strip spaces around those of the header."""
        try:
            cells = next(self._reader([text]))
        except csv.Error as error:
            raise DataError(f"{self.path.name}, row {row}: {error}", next='quote the cell: "…"') from None
        return [cell.strip() for cell in cells] if row == 1 else cells


class _Counted:
    """Feeds lines to csv.reader and tracks the bytes of the current record."""

    def __init__(self, rows: Iterator[tuple[RowPlace, bytes]]):
        self._rows = rows
        self.begin()

    def begin(self) -> None:
        self.row, self.offset, self.size = 0, 0, 0
        self.lines = 0  # of the current record
        self.open = False  # True if an undecodable line may be part of a record

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> str:
        place, raw = next(self._rows)
        if not self.size:
            self.row, self.offset = place.row, place.offset
        self.size += place.size
        self.lines += 1
        if self.size > lines.MAX_ROW_BYTES:
            raise csv.Error("larger than field limit")
        try:
            return lines.decode(raw, self.row)
        except DataError:
            self.open = self.lines > 1 or raw.count(b'"') % 2 == 1
            raise


class _ParquetFile(Protocol):
    """The methods of pyarrow used here; pyarrow has no type stubs."""

    @property
    def schema_arrow(self) -> Any: ...
    @property
    def metadata(self) -> Any: ...
    @property
    def num_row_groups(self) -> int: ...
    def iter_batches(self, batch_size: int, *, columns: list[str]) -> Iterator[Any]: ...
    def read_row_group(self, i: int, columns: list[str]) -> Any: ...


class Parquet:
    """A Parquet file, read one page at a time; a row's number is its index in the file, from 1."""

    def __init__(self, path: Path, renames: Mapping[str, str], *, whole: bool = False):
        pyarrow = needs_pyarrow(path)
        from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

        self.path = path
        with _readable(path, "Parquet"):
            file = parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
            self._file = cast("_ParquetFile", file)
            self._schema = self._file.schema_arrow
        self._keep = _kept(path, self._schema.names, renames, whole=whole)
        self._plain = _converters(pyarrow, self._schema)
        self._group: tuple[int, Any] = (-1, None)

    def rows(self) -> Iterator[tuple[RowPlace, Cells | Wrong]]:
        """Yield (place, fields) of each row."""
        number = 0
        with _readable(self.path, "Parquet"):
            for batch in self._file.iter_batches(batch_size=ROWS, columns=self._keep):
                for place, fields in _fields(batch, self._plain, number):
                    number = place.row
                    yield place, fields

    def at(self, place: RowPlace) -> Cells | Wrong:
        """Read one row again. This reads its whole row group, unless that was the last one read."""
        counts = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        with _readable(self.path, "Parquet"):
            group, inside = _find(counts, place.offset)
            if self._group[0] != group:
                self._group = (group, self._file.read_row_group(group, columns=self._keep))
            return next(_fields(self._group[1].slice(inside, 1), self._plain, place.row - 1))[1]


class Arrow:
    """An Arrow file or stream (also Feather version 2), memory-mapped, read one record batch at a time."""

    def __init__(self, path: Path, renames: Mapping[str, str], *, whole: bool = False):
        pyarrow = needs_pyarrow(path)
        self.path, self._pyarrow = path, pyarrow
        with _readable(path, "Arrow"):
            self._mapped = pyarrow.memory_map(str(path))
            self._is_file = self._mapped.read(6) == b"ARROW1"
            self._schema = self._reader().schema
        self._keep = _kept(path, self._schema.names, renames, whole=whole)
        self._plain = _converters(pyarrow, self._schema)
        self._table: Any = None

    def _reader(self) -> Any:
        self._mapped.seek(0)
        ipc = self._pyarrow.ipc
        return ipc.open_file(self._mapped) if self._is_file else ipc.open_stream(self._mapped)

    def _batches(self) -> Iterator[Any]:
        reader = self._reader()
        if self._is_file:
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from reader

    def rows(self) -> Iterator[tuple[RowPlace, Cells | Wrong]]:
        """Yield (place, fields) of each row."""
        number = 0
        with _readable(self.path, "Arrow"):
            for batch in self._batches():
                for start in range(0, batch.num_rows, ROWS):
                    for place, fields in _fields(
                        batch.slice(start, ROWS).select(self._keep), self._plain, number
                    ):
                        number = place.row
                        yield place, fields

    def at(self, place: RowPlace) -> Cells | Wrong:
        """Read one row again. Uncompressed data stays in the memory-mapped file."""
        with _readable(self.path, "Arrow"):
            if self._table is None:
                self._table = self._reader().read_all().select(self._keep)
            return next(_fields(self._table.slice(place.offset, 1), self._plain, place.row - 1))[1]


def needs_pyarrow(path: Path) -> Any:
    """Return the module pyarrow, or raise DataError saying how to install it."""
    try:
        import_module("pyarrow.ipc")  # optional dependency; importing takes 0.2 s
        return import_module("pyarrow")
    except ImportError:
        raise DataError(
            f"{path.name}: {path.suffix} files need pyarrow, which is not installed", next=EXTRA
        ) from None


class _readable:
    """Turns any read error of pyarrow into a DataError."""

    def __init__(self, path: Path, form: str):
        self._path, self._form = path, form

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, DataError | GeneratorExit):
            return
        # pyarrow's errors derive from these
        if isinstance(error, OSError | ValueError | KeyError | TypeError):
            first = str(error).strip().partition("\n")[0][:200]
            raise DataError(
                f"{self._path.name} cannot be read as {self._form}: {first}",
                next="download or write the file again",
            ) from None


def _kept(path: Path, names: Sequence[str], renames: Mapping[str, str], *, whole: bool) -> list[str]:
    """Return the columns to read. whole: all of them."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path.name}: column {twice!r} occurs twice", next="rename one of them")
    if whole:
        return list(names)
    _check_header(path, names, renames, "the columns")
    return [name for name in names if name in NAMES or name in renames.values()]


def _check_header(path: Path, names: Sequence[str], renames: Mapping[str, str], what: str) -> None:
    """Refuse a table whose columns cannot form a row, before reading it."""
    refuse_missing_columns(renames, names, path.name)
    check_names(names, renames, f"{path.name}, {what}")


def parse_cells(
    raw: Cells | Wrong, row: int, renames: Mapping[str, str], build: Build = row_from_dict
) -> Any:
    """Parse a row of any table."""
    if isinstance(raw, tuple):
        raise DataError(raw[0], next=raw[1])
    return build(_from_json(renamed(raw, renames, row), row), row, renames)


def _from_json(fields: dict[str, Any], row: int) -> dict[str, Any]:
    """Parse lists of messages stored in a column as JSON text.

    A prompt and a completion are parsed only if both are such lists.
    """
    parsed: dict[str, Any] = {}
    for name in ("messages", "conversations"):
        text = fields.get(name)
        if isinstance(text, str):
            try:
                parsed[name] = json_of(text, row, name)
            except DataError as error:
                raise DataError(
                    error.message, next="write the column with json.dumps(…), or the table as .parquet"
                ) from None
    pair = {name: _messages(fields.get(name)) for name in ("prompt", "completion")}
    answers = {name: _messages(fields.get(name)) for name in ("chosen", "rejected")}
    if all(answers.values()):
        prompt = _messages(fields.get("prompt"))
        return {**fields, **parsed, **answers, **({"prompt": prompt} if prompt else {})}
    return {**fields, **parsed, **(pair if all(pair.values()) else {})}


def _messages(value: object) -> list[Any] | None:
    """Parse a list of messages written as JSON text; return None for anything else."""
    if not isinstance(value, str) or not value.startswith('[{"'):
        return None
    try:
        messages = json.loads(value)
    except ValueError:
        return None
    same = is_list(messages) and all(is_object(item) and "role" in item for item in messages)
    return messages if same else None


def _fields(
    batch: Any, plain: Mapping[str, Callable[[Any], Any]], before: int
) -> Iterator[tuple[RowPlace, Cells | Wrong]]:
    """Yield (place, fields) of the rows of a table or batch; `before` rows came before it.

    A row whose text is not UTF-8 yields its error instead of fields.
    """
    size = batch.nbytes // max(1, batch.num_rows)
    for i, fields in enumerate(_rows(batch)):
        if isinstance(fields, UnicodeDecodeError):
            wrong = f"row {before + i + 1}: not UTF-8: {fields.reason}", "write the row again in UTF-8"
            yield RowPlace(before + i + 1, before + i, size), wrong
            continue
        if batch.nbytes > lines.MAX_ROW_BYTES:
            size = len(repr(fields))
            if size > lines.MAX_ROW_BYTES:
                fields = {}
        yield (
            RowPlace(before + i + 1, before + i, size),
            {name: plain[name](value) if value is not None else None for name, value in fields.items()},
        )


def _rows(batch: Any) -> Iterator[Cells | UnicodeDecodeError]:
    """Yield the rows of a batch; decode row by row if one of them is not UTF-8."""
    try:
        yield from batch.to_pylist(maps_as_pydicts="strict")
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            try:
                yield from batch.slice(i, 1).to_pylist(maps_as_pydicts="strict")
            except UnicodeDecodeError as error:
                yield error


def _converters(pyarrow: Any, schema: Any) -> dict[str, Callable[[Any], Any]]:
    return {field.name: _converter(pyarrow, field.type) for field in schema}


def _converter(pyarrow: Any, kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts a value of this Arrow type to the corresponding JSON value.

    A struct has every key in every row, so its null values are dropped as absent keys. JSON that `datasets`
    stores as text is parsed.
    """
    types = pyarrow.types
    if types.is_struct(kind):
        inner = {kind.field(i).name: _converter(pyarrow, kind.field(i).type) for i in range(kind.num_fields)}
        return lambda value: {name: inner[name](item) for name, item in value.items() if item is not None}
    if any(is_kind(kind) for is_kind in _lists(types)):
        each = _converter(pyarrow, kind.value_type)
        return lambda value: [None if item is None else each(item) for item in value]
    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: json.loads(value) if isinstance(value, str) else value
    # a date, decimal or duration, which JSON does not have
    return _as_a_row_holds


def _as_a_row_holds(value: Any) -> object:
    return cast("object", value) if isinstance(value, str | bytes | int | float | dict) else str(value)


def _lists(types: Any) -> list[Callable[[Any], bool]]:
    """Return the type tests for all kinds of Arrow lists; list views exist since pyarrow 16."""
    names = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return [getattr(types, name) for name in names if hasattr(types, name)]


def _find(counts: Sequence[int], index: int) -> tuple[int, int]:
    """Return the group that holds row `index`, and the row's index within it."""
    ends = np.cumsum(counts)
    group = int(np.searchsorted(ends, index, side="right"))
    return group, index - int(ends[group] - counts[group])
