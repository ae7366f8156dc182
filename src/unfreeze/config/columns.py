"""Parse --columns: FIELD=COLUMN as flags, a TOML table or a dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import BeforeValidator


class AsTable:
    """Marks a field whose value can be given as a table: {field = "column"}."""


def pairs(value: Any) -> Any:
    """Convert any spelling to ("prompt=instruction", "completion=output").

    A comma separates pairs only before a FIELD=, so a column name can contain one.
    Raises ValueError for an invalid pair, and for a field or column named twice.
    """
    if isinstance(value, Mapping):
        value = [f"{field}={column}" for field, column in cast(Mapping[str, Any], value).items()]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    columns: list[str] = []
    for part in (part for item in cast(list[Any], value) for part in str(item).split(",")):
        if "=" in part or not columns:
            columns.append(part.strip())
        else:
            columns[-1] += f",{part}"
    if wrong := next((pair for pair in columns if not all(pair.partition("="))), None):
        raise ValueError(f"{wrong!r} is not FIELD=COLUMN, such as prompt=instruction")
    for place, what in ((0, "field"), (2, "column")):
        names = [pair.partition("=")[place] for pair in columns]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"the {what} {twice!r} is named twice")
    return tuple(columns)


Columns = Annotated[tuple[str, ...], BeforeValidator(pairs), AsTable()]
"""Fields of a row and the columns to read them from: ("prompt=instruction", …)."""
