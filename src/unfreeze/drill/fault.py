"""What a planted fault is, and what counts as naming it.

A plant breaks something for real (a file, a configuration, a loop) through the public path and returns the
line a user would see. Where the design makes a fault impossible, the plant measures the thing the fault would
spoil, beside the wrong way done on purpose.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unfreeze.core.errors import UserError
from unfreeze.drill.sandbox import Sandbox

ROWS = (
    "L1",
    "L2",
    "L3",
    "L4",
    "L5",
    "L6",
    "L7",
    "L8",
    "L9",
    "N1",
    "N2",
    "N3",
    "N4",
    "N5",
    "N6",
    "N7",
    "N8",
    "N9",
    "M1",
    "M2",
    "M3",
    "M4",
    "R1",
    "R2",
    "R3",
    "R4",
    "R5",
    "R7",
    "R8",
    "R9",
)
"""The 30 rows of the drill: loading (L), numbers (N), mixtures of experts (M), runs (R). R6, a paid API over
its budget, has no code yet."""


class Unnamed(Exception):
    """A planted fault that went through in silence, or was answered with a line that doesn't name it."""


@dataclass(frozen=True)
class Outcome:
    """How a fault was named.

    caught_by: "room.module:function"; line: what the user reads; next: the command or change it proposes.
    """

    caught_by: str
    line: str
    next: str = ""


@dataclass(frozen=True)
class Fault:
    """One fault of a row; a row may have several. `plant` returns how it was named, or raises Unnamed."""

    row: str
    title: str
    plant: Callable[[Sandbox], Outcome]


def must_refuse(action: Callable[[], Any], *, says: str) -> Outcome:
    """Run what must be refused with a UserError whose message holds `says`.

    caught_by is where it was raised.
    """
    try:
        action()
    except UserError as error:
        line = f"{type(error).__name__}: {error.message}"
        if says not in line:
            raise Unnamed(f"refused, but the line does not say {says!r}: {line}") from error
        return Outcome(raised_in(error), line, error.next)
    raise Unnamed("it went through in silence")


def raised_in(error: BaseException) -> str:
    """Name the innermost function of this package, outside the drill, that the error passed through.

    For example "data.rows.files:read_rows".
    """
    # the first of a chain knows the place; those after it add the file and the next command
    while isinstance(error.__context__, UserError):
        error = error.__context__
    found = "unknown"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        # what collects, not what found
        if (
            module.startswith("unfreeze.")
            and ".drill" not in module
            and frame.f_code.co_name != "raise_if_any"
        ):
            name = frame.f_code.co_qualname
            found = f"{module.removeprefix('unfreeze.')}:{name}"
    return found


def measured(by: Any, line: str, *, holds: bool) -> Outcome:
    """A fact with its numbers, established by `by` (a function or class).

    Where it does not hold, nothing caught the fault.
    """
    if not holds:
        raise Unnamed(line)
    return Outcome(f"{by.__module__.removeprefix('unfreeze.')}:{by.__qualname__}", line)


def said(by: Any, line: str, *, says: str) -> Outcome:
    """A line the program said without stopping (a warning, a count). It has to hold `says`."""
    if says not in line:
        raise Unnamed(f"no line says {says!r}; said: {line or 'nothing'}")
    return measured(by, line, holds=True)
