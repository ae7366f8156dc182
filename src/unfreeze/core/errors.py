"""Errors that a user can fix.

Each message names the value, its limit and the field to change; `next` is the command to try.
Exit codes: a UserError ends a command with 2 (ProcessGone with 1), anything else with 1 (see cli.py).
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable
from typing import Self

from unfreeze.core.units import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)  # errno of an OSError: disk full, or quota exceeded


def size_limit() -> tuple[str, str]:
    """Return the limit that a file ran into with errno EFBIG, and the next command."""
    most, hard = file_limits()
    if most is None:
        return "the file system takes no larger file", "use another file system"
    remedy = "ulimit -f unlimited" + (" in a new shell" if hard is not None else "")
    return f"the limit on a file's size (ulimit -f) is {format_bytes(most)}", remedy


def file_limits() -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of a file's bytes in this process; None: no limit."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None, None
    soft, hard = (
        None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_FSIZE)
    )
    return soft, hard


class UserError(Exception):
    """An error that the user can fix. `next` (optional) is the command or change to try.

    instead: (a wrong name, the nearest one): the command line makes `next` the user's own line with it.
    """

    exit_code = 2
    instead: tuple[str, str] = ("", "")

    def __init__(self, message: str, *, next: str = ""):
        self.message, self.next = printable(message), printable(next)
        super().__init__(self.message)

    def meant(self, wrong: str, right: str) -> Self:
        """Set `instead`."""
        self.instead = wrong, right
        return self

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.next}" if self.next else self.message


class CheckpointError(UserError):
    """A model folder is incomplete, damaged, unsafe, or differs from its config."""


class ConfigError(UserError):
    """A configuration key or value cannot be used."""


class StepRefused(ConfigError):
    """The next step cannot be made; all steps before it are good, and a run saves them first."""


class StepLeft(Exception):
    """The next step is given up, because a signal asked the run to stop; all steps before it are good."""


class DataError(UserError):
    """A data file, or a row of it, cannot be used."""


class AdapterError(UserError):
    """An adapter does not fit its model, or a requested part of it did not learn."""


class DoesNotFit(UserError):
    """The plan needs more memory than the machine has.

    The message holds the arithmetic and what would fit.
    """


_SHORT = re.compile(
    r"DefaultCPUAllocator|not enough memory|cannot allocate memory"
    r"|could not create a (primitive(?! descriptor)|memory)",
    re.IGNORECASE,
)
"""Out-of-memory messages of torch's allocator, mmap and oneDNN."""


def ran_out(error: BaseException) -> str:
    """Describe the failed allocation if the error means out of memory, else "".

    torch raises RuntimeError for host memory and OutOfMemoryError for GPU memory.
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
    """Another process of the run has exited or was killed, so this one stops too.

    silent: True if another process reports it.
    """

    exit_code = 1
    silent = False


LONGEST = 2000  # characters of a message; longer ones lose their middle


def printable(text: str) -> str:
    """Make `text` safe for one line of a terminal, at most LONGEST long.

    Control characters, newlines, text-direction marks and lone surrogates become escapes. Messages quote
    names and values from files, which can hold anything, even terminal escape sequences.
    """
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2 - 20]} … {text[20 - LONGEST // 2 :]}"
    if text.isprintable():
        return text
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return printable(text) if len(text) > LONGEST else text


# Lowest similarity (difflib's ratio) for a suggestion: q_porj and q_proj have 0.83, init and inspect 0.55,
# merge and kernels 0.5.
NEAR = 0.7


def looked_in(path: str) -> str:
    """Words for a missing path: " in /the/current/folder" if it is relative, else "".

    Relative paths, also those in a TOML file, are relative to the current directory.
    """
    return "" if os.path.isabs(path) else f" in {os.getcwd()}"


def closest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Known names similar to `name`, the most similar first, at most `count`."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=NEAR)


def nearest(name: str, known: Iterable[str]) -> str:
    """End of an error message: `"; nearest: 'x'"` if a known name is similar to `name`, else "".

    Similar: by difflib's ratio, or the same letters in another order (stf and sft have only 0.67).
    """
    near = near_word(name, known)
    return f"; nearest: {near!r}" if near else ""


def near_word(name: str, known: Iterable[str]) -> str:
    """Return the known name that `nearest` suggests, else ""."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=NEAR)
    close = close or [other for other in names if sorted(other) == sorted(name)]
    return close[0] if close else ""
