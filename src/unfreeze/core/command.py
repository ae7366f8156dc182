"""The flags every command takes, as the value recipes receive."""

from __future__ import annotations

from typing import NamedTuple


class Common(NamedTuple):
    """The flags that every command has.

    json       the result as one JSON object on the last line of stdout
    quiet      no progress
    traceback  shown for errors that a user can mend, too
    plan       a run shows its whole memory plan, then trains
    """

    json: bool = False
    quiet: bool = False
    traceback: bool = False
    plan: bool = False
