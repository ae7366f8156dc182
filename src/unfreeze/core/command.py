"""Common: the flags that every command takes."""

from __future__ import annotations

from typing import NamedTuple


class Common(NamedTuple):
    """The flags that every command takes.

    json       print the result as one JSON object on the last line of stdout
    quiet      no progress
    traceback  also show tracebacks of user errors
    plan       show the run's full memory plan, then train
    """

    json: bool = False
    quiet: bool = False
    traceback: bool = False
    plan: bool = False
