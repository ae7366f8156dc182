"""Compile an untrusted regular expression.

Refuses invalid patterns and patterns whose matching can take forever. `re` backtracks and has no timeout:
matching (a+)+$ with 40 letters takes longer than a lifetime.
"""

from __future__ import annotations

import re

# the standard library's own parser, so it reads the pattern as `re` does
from re import _constants, _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from unfreeze.core.errors import UserError

NAME = 100  # characters: longer than any module name that is matched
# Limit for the number of ways in which a pattern's repeats can divide a name: enough for four open-ended
# repeats. Most ways fail early, so matching takes at most 0.1 s.
MAX_WAYS = 2 * NAME**4
_REPEATS = {_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT}


def pattern(text: object, where: str, error: type[UserError]) -> re.Pattern[str]:
    """Compile the pattern.

    Raises `error`, its message starting with `where`, for: not a text, not a pattern, a choice or a repeat
    inside a repeat, or more than MAX_WAYS ways to match.
    """
    if not isinstance(text, str) or len(text) > 1000:
        raise error(
            f"{where}: {str(text)[:80]!r} is not a pattern of at most 1,000 characters",
            next="write module names",
        )
    try:
        ways, nested = _ways(_parser.parse(text), inside=False)
        compiled = re.compile(text)
    except (re.error, RecursionError, OverflowError) as fault:
        raise error(
            f"{where}: {text[:80]!r} is not a regular expression: {fault}",
            next="write module names, or correct it",
        ) from None
    if nested or ways > MAX_WAYS:
        why = (
            "a choice or a repeat inside a repeat"
            if nested
            else f"{ways:.0e} ways, the limit is {MAX_WAYS:.0e}"
        )
        raise error(
            f"{where}: {text[:80]!r} could take forever to match: {why}",
            next="write module names, or use one .* for a run of them",
        )
    return compiled


def _ways(parsed: Any, *, inside: bool) -> tuple[float, bool]:
    """Count the ways to divide NAME characters among the pattern's repeats.

    -> (ways, True if a choice or a repeat is inside a repeat)
    """
    ways, nested = 1.0, False
    for operation, value in parsed:
        repeats = operation in _REPEATS
        low, high = (min(value[0], NAME), min(value[1], NAME)) if repeats else (1, 1)
        ways *= high - low + 1
        nested |= inside and (high > low or operation is _constants.BRANCH)
        for part in _parts(value):
            below, below_nested = _ways(part, inside=inside or high > 1)
            ways, nested = ways * below, nested or below_nested
    return ways, nested


def _parts(value: Any) -> list[Any]:
    """Patterns inside one parsed operation."""
    if isinstance(value, _parser.SubPattern):
        return [value]
    if isinstance(value, list | tuple):
        return [part for item in value for part in _parts(item)]
    return []
