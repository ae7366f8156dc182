"""Fault, Outcome, and helpers that decide if a planted fault was reported.

A plant really breaks something (a file, a configuration, a loop) through the public path and returns the
message that a user would see. If the design makes a fault impossible, the plant measures the affected value,
and also computes it the wrong way for comparison.
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
    "R6",
    "R7",
    "R8",
    "R9",
    "G1",
    "G2",
    "G3",
    "G4",
)
"""The 35 rows of the drill: loading (L), numbers (N), mixtures of experts (M), runs (R), rewards (G)."""


class Unnamed(Exception):
    """A planted fault passed in silence, or with a message that doesn't name it."""


@dataclass(frozen=True)
class Outcome:
    """The report of a fault.

    caught_by: "package.module:function"; line: the user's message; next: its remedy.
    """

    caught_by: str
    line: str
    next: str = ""


@dataclass(frozen=True)
class Fault:
    """One fault of a row, which can have several. `plant` returns its Outcome, or raises Unnamed."""

    row: str
    title: str
    plant: Callable[[Sandbox], Outcome]


def must_refuse(action: Callable[[], Any], *, says: str) -> Outcome:
    """Run an action that must raise a UserError whose message contains `says`.

    caught_by is the function that raised it.
    """
    try:
        action()
    except UserError as error:
        line = f"{type(error).__name__}: {error.message}"
        if says not in line:
            raise Unnamed(f"refused, but the line does not say {says!r}: {line}") from error
        return Outcome(raised_in(error), line, error.next)
    raise Unnamed("it passed in silence")


def raised_in(error: BaseException) -> str:
    """Name the innermost function of this package, outside the drill, in the error's traceback.

    For example "data.rows.files:read_rows".
    """
    # the first error of a chain has the place; later ones add file and remedy
    while isinstance(error.__context__, UserError):
        error = error.__context__
    place = "unknown"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        # raise_if_any only collects errors
        if (
            module.startswith("unfreeze.")
            and ".drill" not in module
            and frame.f_code.co_name != "raise_if_any"
        ):
            name = frame.f_code.co_qualname
            place = f"{module.removeprefix('unfreeze.')}:{name}"
    return place


def measured(by: Any, line: str, *, holds: bool) -> Outcome:
    """Return the outcome of a measurement of `by` (a function or class).

    Raises Unnamed if it does not hold.
    """
    if not holds:
        raise Unnamed(line)
    return Outcome(f"{by.__module__.removeprefix('unfreeze.')}:{by.__qualname__}", line)


def said(by: Any, line: str, *, says: str) -> Outcome:
    """Return the outcome of a message without an error (a warning, a count), which must contain `says`."""
    if says not in line:
        raise Unnamed(f"no line says {says!r}; got: {line or 'nothing'}")
    return measured(by, line, holds=True)
