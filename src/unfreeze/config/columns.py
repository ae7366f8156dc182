"""The form of --columns: FIELD=COLUMN, as flags, a TOML table or a dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import BeforeValidator


class AsTable:
    """Marks a field whose value may be given as a table: {field = "column"}."""


def pairs(value: Any) -> Any:
    """Any spelling -> ("prompt=instruction", "completion=output").

    A comma parts two pairs only where a FIELD= follows, so that a column's name may have one.
    Raises ValueError for what is no pair, and for a field or a column that is named twice.
    """
    if isinstance(value, Mapping):
        value = [f"{field}={column}" for field, column in cast(Mapping[str, Any], value).items()]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    found: list[str] = []
    for part in (part for item in cast(list[Any], value) for part in str(item).split(",")):
        if "=" in part or not found:
            found.append(part.strip())
        else:
            found[-1] += f",{part}"
    if wrong := next((pair for pair in found if not all(pair.partition("="))), None):
        raise ValueError(f"{wrong!r} is not FIELD=COLUMN, such as prompt=instruction")
    for place, what in ((0, "field"), (2, "column")):
        names = [pair.partition("=")[place] for pair in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"the {what} {twice!r} is named twice")
    return tuple(found)


Columns = Annotated[tuple[str, ...], BeforeValidator(pairs), AsTable()]
"""A row's fields and the columns they are read from: ("prompt=instruction", …)."""
