"""Faults that pydantic sees in a body, in plain words: the field, its value, the limit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from unfreeze.core.errors import nearest

SHOWN = 40  # characters of a value
QUIET = ("messages", "prompt", "tools", "tokens")
"""Fields of a user's words: a message names the kind of a value there, and does not repeat it."""
TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
    "model_attributes": "an object",
}
KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}


def wording(error: ValidationError, body: Mapping[str, Any], form: type[BaseModel]) -> tuple[str, str | None]:
    """Return a message and the field at fault; of several forms of a field, the fault of the nearest."""
    faults = error.errors(include_url=False)
    first = max(
        (each for each in faults if each["loc"][:1] == faults[0]["loc"][:1]),
        key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")),
    )
    loc = first["loc"]
    if not loc:  # of two fields together
        words = first["msg"].removeprefix("Value error, ")
        return words, next((name for name in words.split()[:1] if name in form.model_fields), None)
    name, path = str(loc[0])[:80], place(loc, body, last=first["type"] in ("missing", "extra_forbidden"))
    if first["type"] == "extra_forbidden":
        known = nearest(str(loc[0]), form.model_fields) if len(loc) == 1 else ""
        return f"{path}: this field is not known here{known}", name
    value = shown(first["input"], quiet=name in QUIET)
    return f"{path}: {_words(first['type'], first.get('ctx', {}), value, first['msg'])}", name


def place(loc: tuple[int | str, ...], body: Any, *, last: bool) -> str:
    """Return a path such as stop[1], without pydantic's names of the forms of a field.

    last: the end of the path is a field's name, whether it is there or not
    """
    path = ""
    for i, part in enumerate(loc):
        if isinstance(part, int) and isinstance(body, list) and part < len(body):
            path, body = f"{path}[{part}]", body[part]
        elif isinstance(body, dict) and part in body:
            path, body = f"{path}.{str(part)[:SHOWN]}", body[part]
        elif last and i == len(loc) - 1:
            path = f"{path}.{str(part)[:SHOWN]}"
    return path.removeprefix(".")


def shown(value: Any, *, quiet: bool = False) -> str:
    """Return a value in a message: as JSON, or the kind of one that is long or a user's words."""
    if value is None:
        return "null"
    if isinstance(value, dict | list) or quiet:
        return KINDS.get(type(value), "an object")
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _words(kind: str, limits: Mapping[str, Any], value: str, otherwise: str) -> str:
    if (expected := TYPES.get(kind.removesuffix("_type"))) is not None:
        return f"{expected} is expected, not {value}"
    words = {
        "int_from_float": f"a whole number is expected, not {value}",
        "finite_number": f"a finite number is expected, not {value}",
        "missing": "this field is missing",
        "less_than_equal": f"{value} is too large; at most {_number(limits, 'le')} is possible",
        "less_than": f"{value} is too large; it must be below {_number(limits, 'lt')}",
        "greater_than_equal": f"{value} is too small; at least {_number(limits, 'ge')} is possible",
        "greater_than": f"{value} is too small; it must be above {_number(limits, 'gt')}",
        "too_short": f"the list is empty; it needs at least {_number(limits, 'min_length')}",
        "too_long": f"there are {_number(limits, 'actual_length')}; at most {_number(limits, 'max_length')}",
        "string_too_short": "an empty text is not possible",
        "string_pattern_mismatch": f"{value} must be 1 to 64 letters, digits, _ or -",  # a schema's name
        "literal_error": f"{value} is not possible; possible is {_choices(limits)}",
        "value_error": otherwise.removeprefix("Value error, "),
    }
    return words.get(kind) or otherwise[:1].lower() + otherwise[1:]


def _number(limits: Mapping[str, Any], name: str) -> str:
    value = limits.get(name, 0)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _choices(limits: Mapping[str, Any]) -> str:
    expected = str(limits.get("expected"))
    return {"False": "false", "True": "true"}.get(expected, expected)
