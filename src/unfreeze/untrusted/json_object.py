"""A JSON object from a file or a line that someone else wrote: read strictly, or refused with one UserError.

No input may cause a traceback, a hang or a full memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from unfreeze.core.errors import UserError

MAX_BYTES = 200_000_000  # the largest file read whole; Kimi-K2's index, with 207,000 tensors, has 25 MB
DAMAGED = "download or write the file again"


def read_object(path: Path, error: type[UserError], *, next: str = DAMAGED) -> dict[str, Any]:
    """Read the object in a JSON file, UTF-8 with or without a byte order mark.

    `error` is the class to raise, `next` what it tells the user to do.
    Refused: larger than MAX_BYTES, and what parse_object refuses. The file must exist.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise error(
            f"{path} has {size:,} bytes; a JSON file of more than {MAX_BYTES:,} is not read", next=next
        )
    return parse_object(path.read_bytes(), str(path), error, next=next)


def parse_object(raw: bytes, what: str, error: type[UserError], *, next: str = DAMAGED) -> dict[str, Any]:
    """bytes -> the object.

    Refused: not UTF-8, not JSON, not an object, one key twice with different values, a number of more than
    4,300 digits, nesting deeper than the interpreter's stack. NaN and Infinity pass: the reader of the field
    checks them.
    """
    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=one_value_per_key)
    except (ValueError, RecursionError) as fault:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise error(f"{what} is not JSON: {fault}", next=next) from None
    if not isinstance(value, dict):
        raise error(f"{what} holds a JSON {type(value).__name__}, not an object", next=next)
    return value


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value out of JSON is an object; its keys are texts then, and what they hold anything."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether a value out of JSON is a list."""
    return isinstance(value, list)


def one_value_per_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict; ValueError where a key comes twice with different values.

    Readers don't agree on which one counts.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        for name, given in pairs:
            if given != value[name] and not given != given:  # NaN differs from itself
                raise ValueError(f"field {name!r} stands twice with different values")
    return value
