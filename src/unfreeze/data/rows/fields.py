"""Type checks for a row's fields: return the typed value, or raise DataError naming row and field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn, cast

from unfreeze.core.errors import DataError
from unfreeze.untrusted.json_object import is_list, is_object

MAX_DEPTH = 200
"""Maximum nesting of lists and objects; a tool's schema needs about a dozen. Rendering or printing a row
takes two stack frames per level."""


def list_of(value: object, row: int, where: str, *, empty: bool = False) -> list[object]:
    if not is_list(value):
        raise DataError(f"row {row}: field {where} is {json_type(value)}, expected a list")
    if not value and not empty:
        raise DataError(f"row {row}: field {where} is empty")
    return value


def object_of(value: object, row: int, where: str) -> dict[str, object]:
    if not is_object(value):
        raise DataError(f"row {row}: field {where} is {json_type(value)}, expected an object")
    return value


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def half_surrogate(text: str) -> re.Match[str] | None:
    """Find an unpaired surrogate in a text: JSON can spell one, but UTF-8 cannot encode it."""
    return None if text.isascii() else _LONE_SURROGATE.search(text)


def text_of(value: object, row: int, where: str, *, empty: bool = False) -> str:
    if value is None:
        raise DataError(f"row {row}: field {where} is missing")
    if not isinstance(value, str):
        raise DataError(f"row {row}: field {where} is {json_type(value)}, expected a text")
    if not empty and not value.strip():
        raise DataError(f"row {row}: field {where} is empty")
    if half := half_surrogate(value):
        raise DataError(
            f"row {row}: field {where} has half a surrogate pair (\\u{ord(half.group()):04x}) at character"
            f" {half.start()}"
        )
    return value


def json_type(value: object) -> str:
    names: dict[type[Any], str] = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else f"{names.get(type(value), type(value).__name__)} ({str(value)[:40]})"


def json_of(text: str, row: int, where: str) -> object:
    """Parse JSON that a field holds as text."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"row {row}: field {where} is text that is not JSON ({text[:40]!r}):"
            f" {error or type(error).__name__}"
        ) from None
    if deeper_than(value, MAX_DEPTH):
        raise DataError(
            f"row {row}: field {where} is nested deeper than {MAX_DEPTH} levels", next="flatten it"
        )
    return value


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def deeper_than(value: object, most: int) -> bool:
    """Return True if lists and objects are nested more than `most` levels deep.

    Code that walks a row recurses once per level.
    """
    level: list[Any] = [value]
    for _ in range(most):
        level = [
            item
            for node in level
            for item in cast("Iterable[Any]", node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True
