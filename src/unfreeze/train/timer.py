"""When a save is due by the clock: so many minutes after the one before."""

from __future__ import annotations

import time
from collections.abc import Callable


class SaveTimer:
    """`due()` is True from `minutes` after the timer was made or restarted; 0 minutes: never."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock, self._since = 60 * minutes, clock, clock()

    def due(self) -> bool:
        return self._seconds > 0 and self._clock() - self._since >= self._seconds

    def restart(self) -> None:
        self._since = self._clock()
