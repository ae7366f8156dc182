"""One HTTP request on its way through the server: its id, and whether somebody still waits for the answer."""

from __future__ import annotations

import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

EVENTS = "unfreeze.events"
"""Key in the state of an ASGI scope: True once a stream of events has begun."""


@dataclass(eq=False)
class Visit:
    """A request.

    id     in the answer's header x-request-id, and in the log
    began  seconds of the monotonic clock
    gone   True once nobody waits: the client left, time ran out, or the answer is complete
    words  why it ended before its time, for the log and for /metrics: "gone", "too long", "drained"
    """

    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")
    began: float = field(default_factory=time.monotonic)
    gone: bool = False
    words: str = ""

    def leave(self, words: str) -> None:
        """Nobody waits any more; the first reason stays."""
        self.words = self.words or words
        self.gone = True


VISIT: ContextVar[Visit | None] = ContextVar("visit", default=None)
"""The request that this task answers; None outside a server."""
