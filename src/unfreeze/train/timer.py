"""When a run saves: every so many steps, or so many minutes after the save before."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from unfreeze.train.state import OnFullDisk


@dataclass(frozen=True)
class Saves:
    """When fit saves, and what of it stays. At the end and on an interruption it always saves.

    every         steps between saves; 0: none.
    minutes       of `clock` since the last save, after which it saves; 0: never. Process 0's clock decides.
    keep          saves that stay.
    on_full_disk  "continue": a save without room on the disk is a warning, except the last of this call.
    """

    every: int = 0
    minutes: float = 0
    keep: int = 2
    on_full_disk: OnFullDisk = "stop"
    clock: Callable[[], float] = time.monotonic


class SaveTimer:
    """`due()` is True from `minutes` after the timer was made or restarted; 0 minutes: never."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock, self._since = 60 * minutes, clock, clock()

    def due(self) -> bool:
        return self._seconds > 0 and self._clock() - self._since >= self._seconds

    def restart(self) -> None:
        self._since = self._clock()
