"""Rows with all their columns, and the texts in them."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from unfreeze.core.errors import DataError, nearest
from unfreeze.core.units import format_bytes
from unfreeze.data.rows import lines
from unfreeze.data.rows.fields import MAX_DEPTH, deeper_than, text_of
from unfreeze.data.rows.files import whole_reader
from unfreeze.data.rows.lines import JsonLines, TextFile, decode, json_object
from unfreeze.data.rows.row import RowPlace
from unfreeze.untrusted.json_object import is_list, is_object

Fields = dict[str, Any]

ALONE = ("text", "content")
"""A column of this name is the document."""
TURNS = (
    *("system", "messages", "conversations", "prompt", "instruction", "input", "question"),
    *("completion", "output", "answer", "chosen", "rejected"),
)
"""Else the texts in these columns are, in this order."""
INSIDE = ("content", "value", "text")
"""Keys of a turn, or of a part of one, that hold text."""


class Item(NamedTuple):
    """A row of an input file.

    bytes    bytes in the file; of a table, the bytes of its JSON line
    fields   its columns; {} if it is bad
    line     its JSON line, verbatim from a file of JSON lines
    wrong    why it is bad, else ""
    next     the remedy for a bad row
    """

    place: RowPlace
    bytes: int
    fields: Fields
    line: bytes
    wrong: str = ""
    next: str = ""


def items(path: Path) -> Iterator[Item]:
    """Yield every row of a data file of any format, bad ones too."""
    file = whole_reader(path)
    verbatim, is_lines = type(file) is JsonLines, isinstance(file, JsonLines)
    for place, raw in file.rows():
        fields: Fields = {}
        try:
            if place.size > lines.MAX_ROW_BYTES:
                raise DataError(
                    f"row {place.row}: {format_bytes(place.size)}, the limit is"
                    f" {format_bytes(lines.MAX_ROW_BYTES)}; is a line break missing?"
                )
            if isinstance(raw, tuple):
                message, remedy = cast("tuple[str, str]", raw)
                raise DataError(message, next=remedy)
            if is_lines:
                is_text = isinstance(file, TextFile)
                fields = {"text": decode(raw, place.row).strip()} if is_text else json_object(raw, place.row)
            else:
                fields = {name: _without_bytes(value) for name, value in raw.items()}
            line = raw.strip() + b"\n" if verbatim else json_line(fields, place.row)
        except DataError as error:
            yield Item(place, place.size, {}, b"", error.message, error.next)
            continue
        yield Item(place, len(line) if not is_lines and path_is_table(path) else place.size, fields, line)


def path_is_table(path: Path) -> bool:
    """True for formats whose rows have no bytes of their own in the file."""
    return path.suffix.lower() in (".parquet", ".arrow", ".feather")


def json_line(fields: Fields, row: int) -> bytes:
    """Write a row as a line of JSON, in UTF-8. Raises DataError for a value that JSON cannot hold."""
    try:
        text = json.dumps(_finite(fields), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:  # bytes, half a surrogate pair, endless nesting
        raise DataError(
            f"row {row}: cannot be written as JSON: {error}", next="leave that column out"
        ) from None


def _without_bytes(value: Any) -> Any:
    """Bytes of a table as JSON can hold them: text where they are UTF-8, else {"base64": …}.

    Old writers store texts as bytes, and images and hashes are bytes that no text is.
    """
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode("ascii")}
    if is_object(value):
        return {name: _without_bytes(item) for name, item in value.items()}
    return [_without_bytes(item) for item in value] if is_list(value) else value


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which tables hold for missing numbers and JSON does not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_object(value):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if is_list(value) else value


def changed(fields: Fields, column: str, row: int, change: Callable[[str], str]) -> Fields:
    """Return the row with change(text) for each of its texts, in order.

    column: the recipe's `text`; "": text or content if there, else the texts of a conversation.
    Raises DataError if there is no text, or one is not a text.
    """
    names = [column] if column else _columns(fields)
    if not names or names[0] not in fields:
        empty = "" if column else next((name for name in (*ALONE, *TURNS) if name in fields), "")
        if empty:
            raise DataError(
                f"row {row}: {empty} is {_kind(fields[empty])}", next="correct the row, or --on-bad-row skip"
            )
        near = nearest(column or "text", fields)
        raise DataError(
            f"row {row}: no {f'column {column!r}' if column else 'text'}{near}; columns:"
            f" {', '.join(list(fields)[:12]) or 'none'}",
            next="--text COLUMN names the column with the text",
        )
    if deeper_than(fields, MAX_DEPTH):
        raise DataError(f"row {row}: nested deeper than {MAX_DEPTH} levels", next="flatten the row")
    return {
        name: _changed(value, row, name, change) if name in names else value for name, value in fields.items()
    }


def _kind(value: Any) -> str:
    if is_object(value) and value.keys() == {"base64"}:  # of _without_bytes
        return "bytes that are not UTF-8"
    return "null" if value is None else f"{type(value).__name__}, not a text"


def _columns(fields: Mapping[str, Any]) -> list[str]:
    alone = [name for name in ALONE if isinstance(fields.get(name), str)]
    return alone[:1] or [name for name in TURNS if isinstance(fields.get(name), str | list)]


def _changed(value: Any, row: int, name: str, change: Callable[[str], str]) -> Any:
    if is_list(value):
        return [
            {
                key: _changed(inner, row, name, change) if key in INSIDE and inner is not None else inner
                for key, inner in item.items()
            }
            if is_object(item)
            else change(text_of(item, row, name, empty=True))
            if isinstance(item, str)
            else item
            for item in value
        ]
    return change(text_of(value, row, name, empty=True))


def every_text(value: object) -> Iterator[str]:
    """All texts in a value, at any depth: what an evaluation row holds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        inner = (
            cast("Mapping[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        )
        for item in inner:
            yield from every_text(item)
