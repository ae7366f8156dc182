"""Ctrl-C, SIGTERM and SIGUSR1: the first one makes the loop finish its step and save.

A second Ctrl-C stops the process as usual. SIGTERM and SIGUSR1 never do more, however often they arrive. A
scheduler signals every process of a job, and torchrun then passes the same signal on to its workers. If the
second of these stopped the process at once, the steps since the last save would be lost.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

AGAIN = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that may arrive more than once for one request. Windows has no SIGUSR1."""
SIGNALS = (signal.SIGINT, *AGAIN)


class Interrupt:
    """with Interrupt() as interrupt: `interrupt.requested` becomes True at the first signal.

    SIGINT's previous handler is restored at once, so a second Ctrl-C raises KeyboardInterrupt wherever the
    program is; the others' handlers are restored at the end.
    Python runs handlers only in the main thread: in another thread nothing is installed, and `requested`
    stays False.
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
        for number in list(self._former):
            self._restore(number)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore(signal.SIGINT)

    def _restore(self, number: signal.Signals) -> None:
        if number in self._former:
            signal.signal(number, self._former.pop(number))
