"""Ctrl-C and SIGTERM: the first asks the loop to finish its step and save.

The second stops the process as usual.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """with Interrupt() as interrupt: `interrupt.requested` turns True at the first signal.

    The former handlers are put back at once.
    So a second Ctrl-C raises KeyboardInterrupt wherever the program is. Python runs handlers in the main
    thread only: in another thread nothing is installed and `requested` stays False.
    """

    def __init__(self) -> None:
        self.requested = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._first) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}
