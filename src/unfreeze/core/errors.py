"""Errors a user can act on. Each message names the value tested, its limit and the field to change; `next` is the command to try.

Exit codes: a UserError ends a command with 2, anything else with 1 (see cli.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend. `next` (optional) is the command or the change to try now."""

    def __init__(self, message: str, *, next: str = ""):
        super().__init__(message)
        self.message = message
        self.next = next

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.next}" if self.next else self.message


class CheckpointError(UserError):
    """A model folder that is incomplete, damaged, unsafe or not what its config says."""


class ConfigError(UserError):
    """A configuration key or value that cannot be used."""


class DataError(UserError):
    """A data file or a row of it that cannot be used."""


class AdapterError(UserError):
    """An adapter that does not fit its model, or that was asked for and did not learn."""


class DoesNotFit(UserError):
    """The plan needs more memory than the machine has; the message holds the arithmetic and what would fit."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; nearest: 'x'"` where some known name is close to `name`, else an empty string. For the end of an error message."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; nearest: {close[0]!r}" if close else ""
