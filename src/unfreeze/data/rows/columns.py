"""--columns prompt=instruction,completion=output: a data file's own names for a row's fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unfreeze.core.errors import ConfigError, DataError, nearest
from unfreeze.data.rows.shapes import NAMES, NEEDED


def renames_of(columns: Sequence[str]) -> dict[str, str]:
    """Parse ("prompt=instruction", …) into {"prompt": "instruction", …}: row field -> column.

    Raises ConfigError for a field that rows don't have.
    """
    renames = dict(column.split("=", 1) for column in columns)
    if unknown := next((name for name in renames if name not in NAMES), ""):
        raise ConfigError(
            f"columns: {unknown!r} is no field of a row{nearest(unknown, NAMES)}; known: {', '.join(NAMES)}",
            next="FIELD=COLUMN, such as --columns prompt=instruction,completion=output",
        )
    return renames


def renamed(fields: dict[str, Any], renames: Mapping[str, str], row: int) -> dict[str, Any]:
    """Return the row's fields under our names. Raises DataError if a required column is missing."""
    if not renames:
        return fields
    refuse_missing_columns(renames, fields, f"row {row}")
    mapped = {ours: fields[column] for ours, column in renames.items() if column in fields}
    left = {name: value for name, value in fields.items() if name not in renames.values()}
    return {**left, **mapped}


def refuse_missing_columns(renames: Mapping[str, str], there: Iterable[str], where: str) -> None:
    """Raise DataError if a required column is missing. Optional ones (system, input, tools) may be absent."""
    names = list(there)
    missing = next(
        (column for ours, column in renames.items() if column not in names and ours in NEEDED), None
    )
    if missing is not None:
        raise DataError(
            f"{where}: there is no column {missing!r}{nearest(missing, names)}; there are:"
            f" {', '.join(sorted(names)[:20]) or 'none'}",
            next="correct --columns FIELD=COLUMN",
        )
