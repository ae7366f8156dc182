"""Read an untrusted JSON object from a file or line, strictly, or refuse it with one UserError.

No input can cause a traceback, a hang or exhausted memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from unfreeze.core.errors import UserError

MAX_BYTES = 200_000_000  # limit for a file; Kimi-K2's index with 207,000 tensors has 25 MB
DAMAGED = "download or write the file again"


def read_object(path: Path, error: type[UserError], *, next: str = DAMAGED) -> dict[str, Any]:
    """Read the object in a JSON file, UTF-8 with or without a byte order mark.

    error: class to raise; next: its remedy.
    Refuses files above MAX_BYTES and everything that parse_object refuses. The file must exist.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise error(f"{path} has {size:,} bytes; the limit for a JSON file is {MAX_BYTES:,}", next=next)
    return parse_object(path.read_bytes(), str(path), error, next=next)


def parse_object(raw: bytes, what: str, error: type[UserError], *, next: str = DAMAGED) -> dict[str, Any]:
    """Parse bytes to an object.

    Refuses: not UTF-8, not JSON, not an object, a key twice with different values, a number with more than
    4,300 digits, nesting deeper than the interpreter's stack. NaN and Infinity are accepted here; the reader
    of the field checks them.
    """
    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=one_value_per_key)
    except (ValueError, RecursionError) as fault:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise error(f"{what} is not JSON: {fault}", next=next) from None
    if not isinstance(value, dict):
        raise error(f"{what} holds a JSON {type(value).__name__}, not an object", next=next)
    return value


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """True if a JSON value is an object, with str keys and values of any type."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """True if a JSON value is a list."""
    return isinstance(value, list)


def one_value_per_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict. Raises ValueError if a key occurs twice with different values.

    JSON readers do not agree on which value counts.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        for name, item in pairs:
            if item != value[name] and not item != item:  # NaN differs from itself
                raise ValueError(f"field {name!r} occurs twice with different values")
    return value
