"""Turn pydantic's errors about a value into plain messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from unfreeze.config.synonyms import value_hint

IS_NO = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
}
"""Prefix of pydantic's error type -> the expected kind of value."""
MUST = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "too_short": "needs at least {min_length}",
    "too_long": "takes at most {max_length}",
    "string_too_short": "needs a character",
}
"""pydantic's error type -> the limit in words."""
KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def wrong(name: str, value: object, fault: Mapping[str, Any]) -> str:
    """Message such as "steps = 'three' is not a whole number"; for an item of a list, also the item.

    fault: one of ValidationError.errors().
    """
    inside = any(isinstance(part, int) for part in fault["loc"])
    subject = f"{name} = {value!r:.60}" + (f": {fault['input']!r:.60}" if inside else "")
    kind, context = fault["type"], fault.get("ctx", {})
    if kind in MUST:
        return f"{subject}: {MUST[kind].format(**context)}"
    if kind == "literal_error":
        words = context["expected"].replace(" or ", ", ").removeprefix("'', ")  # '': the flag is left out
        return f"{subject} is not one of {words}{value_hint(name, value)}"
    if (word := IS_NO.get(kind.partition("_")[0])) and kind != "string_too_short":
        return f"{subject} is not {word}"
    message = fault["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
    return f"{subject}: {message}"


def fault_of(faults: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Choose the error to report. For a field that takes a word or a number: its limit, or both kinds."""
    first, *others = faults
    if not others or first["type"] != "literal_error":
        return first
    if others[0]["type"] in MUST:
        return others[0]
    number = IS_NO.get(others[0]["type"].partition("_")[0], "a number")
    return {**first, "ctx": {"expected": f"{first['ctx']['expected']}, {number}"}}


def wrong_flag(flag: str, values: Sequence[str], info: FieldInfo) -> str:
    """Message about the values given to a flag, "" if they are valid.

    "--steps = 'three' is not a whole number", "--steps 0: must be at least 1", "--steps needs a value:
    a whole number".
    """
    annotation = info.annotation
    kinds = [kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is tuple]
    inner = get_args(kinds[0])[0] if kinds else annotation
    if bool in (inner, *get_args(inner)):
        return ""
    if not values:
        return f"{flag} needs {'values' if kinds else 'a value'}: {expected(inner)}"
    if not kinds and len(values) > 1:
        return f"{flag} takes one value, got also {values[1]!r}"
    limited: Any = inner if kinds else Annotated[(inner, *info.metadata, Field())]
    typed: TypeAdapter[Any] = TypeAdapter(limited, config=ConfigDict(allow_inf_nan=False))
    for value in values:
        try:
            typed.validate_python(value)
        except ValidationError as error:
            faults = [fault for fault in error.errors() if not fault["type"].startswith("none")]
            fault: dict[str, Any] = {**fault_of(faults or error.errors()), "loc": ()}
            if fault["type"] in MUST:
                return f"{flag} {value}: {MUST[fault['type']].format(**fault.get('ctx', {}))}"
            return wrong(flag, value, fault)
    return ""


def expected(annotation: Any) -> str:
    """Expected values in words: 'a whole number', 'one of cosine, linear', else 'text'."""
    parts = [part for part in (annotation, *get_args(annotation)) if part is not NoneType]
    for part in parts:
        if part in KINDS:
            return KINDS[part]
        if get_origin(part) is Literal:
            return f"one of {', '.join(map(str, get_args(part)))}"
    return "text"
