"""Errors a user can act on.

Each message names the value tested, its limit and the field to change; `next` is the command to try.
Exit codes: a UserError ends a command with 2 (ProcessGone with 1), anything else with 1 (see cli.py).
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable

from unfreeze.core.units import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: the disk is full, or the user's share of it


class UserError(Exception):
    """Something the user can mend. `next` (optional) is the command or the change to try now."""

    exit_code = 2

    def __init__(self, message: str, *, next: str = ""):
        self.message, self.next = printable(message), printable(next)
        super().__init__(self.message)

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
    """The plan needs more memory than the machine has.

    The message holds the arithmetic and what would fit.
    """


_SHORT = re.compile(
    r"DefaultCPUAllocator|not enough memory|cannot allocate memory"
    r"|could not create a (primitive(?! descriptor)|memory)",
    re.IGNORECASE,
)
"""What torch's allocator, mmap and oneDNN say of a shortage."""


def ran_out(error: BaseException) -> str:
    """What could not be allocated, where an error is a shortage of memory; else "".

    torch raises a RuntimeError for the host's memory, and OutOfMemoryError for a GPU's.
    """
    size = re.search(r"allocate (\d+ bytes|[\d.]+ [KMGT]iB)", text := str(error))
    short = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    short |= isinstance(error, RuntimeError) and _SHORT.search(text) is not None
    short |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not short:
        return ""
    if not size:
        return "an allocation failed"
    count, unit = size[1].split()
    return f"{format_bytes(int(count)) if unit == 'bytes' else size[1]} could not be allocated"


class ProcessGone(UserError):
    """Another process of the run has ended or was killed, so this one ends too.

    silent: another process says it.
    """

    exit_code = 1
    silent = False


LONGEST = 2000  # characters of a message; more is cut out of its middle


def printable(text: str) -> str:
    """Make `text` safe for one line of a terminal, at most LONGEST long.

    Control characters, newlines, text-direction marks and lone surrogates become escapes. Messages quote
    names and values from files, and a file may hold anything, escape sequences for the terminal included.
    """
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2 - 20]} … {text[20 - LONGEST // 2 :]}"
    if text.isprintable():
        return text
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return printable(text) if len(text) > LONGEST else text


# The least similarity (difflib's ratio) of a name that is suggested: q_porj and q_proj have 0.83, init and
# inspect 0.55, merge and kernels 0.5.
NEAR = 0.7


def looked_in(path: str) -> str:
    """Where a path that isn't there was looked for: " in /the/current/folder" where it is relative, else "".

    Relative paths, those in a TOML file too, count from the folder that the command is given in.
    """
    return "" if os.path.isabs(path) else f" in {os.getcwd()}"


def closest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that are near `name`, at most `count` of them, the nearest first."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=NEAR)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: `"; nearest: 'x'"` where a known name is close to `name`, else "".

    Close: by difflib's ratio, or with the same letters in another order (stf and sft have 0.67).
    """
    near = near_word(name, known)
    return f"; nearest: {near!r}" if near else ""


def near_word(name: str, known: Iterable[str]) -> str:
    """The known name that `nearest` names, "" without one."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=NEAR)
    close = close or [other for other in names if sorted(other) == sorted(name)]
    return close[0] if close else ""
