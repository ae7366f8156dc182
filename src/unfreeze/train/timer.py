"""Timing of saves: every N steps, or N minutes after the previous save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from unfreeze.train.state import OnFullDisk


@dataclass(frozen=True)
class Saves:
    """When fit saves, and which saves are kept. It always saves at the end and on an interruption.

    every         steps between saves; 0: none
    minutes       of `clock` after the last save; 0: never. Process 0's clock decides
    keep          number of saves kept
    on_full_disk  "continue": a save without room on the disk only warns, except the last of this call
    """

    every: int = 0
    minutes: float = 0
    keep: int = 2
    on_full_disk: OnFullDisk = "stop"
    clock: Callable[[], float] = time.monotonic


class SaveTimer:
    """`due()` is True once `minutes` have passed since creation or restart; 0 minutes: never."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock, self._since = 60 * minutes, clock, clock()

    def due(self) -> bool:
        return self._seconds > 0 and self._clock() - self._since >= self._seconds

    def restart(self) -> None:
        self._since = self._clock()
