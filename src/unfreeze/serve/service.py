"""A server from its first second: loading, ready, draining; its gate, its counts, and the routes behind them.

    GET /health   {"status": "loading", "loaded": 0.4} with 503, {"status": "ready"} with 200, without a key
    GET /metrics  Prometheus' text

Everything else is the router's, and waits outside with 503 until the model is there.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, cast

from unfreeze.serve.gate import Gate, Receive, Rules, Scope, Send
from unfreeze.serve.metrics import Metered, Metrics
from unfreeze.serve.request import Refused

if TYPE_CHECKING:
    from unfreeze.serve.router import Router
    from unfreeze.serve.speaker import Speaker

LAST = 2.0  # seconds to tell those that are cut off
LOOK = 0.05  # seconds between two looks at what still runs
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Service:
    """An ASGI application: the gate, then /health, /metrics and the router.

    loaded  share of the weights that are read, 0 to 1
    """

    def __init__(self, rules: Rules | None = None):
        self.metrics = Metrics()
        self.gate = Gate(
            self._route, rules or Rules(), ended=self.metrics.ended, retry_after=self.metrics.retry_after
        )
        self.loaded = 0.0
        self.router: Router | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.gate(scope, receive, send)

    def ready(self, router: Router) -> None:
        """Answer by this router from now on; its requests are counted."""
        self.metrics.load = getattr(router.speaker, "load", None)
        router.speaker = cast("Speaker", Metered(router.speaker, self.metrics))
        self.router = router

    @property
    def state(self) -> str:
        """ "loading", "ready" or "draining"."""
        return "draining" if self.gate.draining else "ready" if self.router else "loading"

    def drain(self, seconds: float, hurry: threading.Event | None = None) -> int:
        """Take no new requests, and wait for those that run; after `seconds`, or in a hurry, they end.

        -> requests that did not end by themselves.
        """
        self.gate.draining = True
        until = time.monotonic() + seconds
        while self.gate.visits and time.monotonic() < until and not (hurry and hurry.is_set()):
            time.sleep(LOOK)
        left = len(self.gate.visits)
        self.gate.end_all()
        until = time.monotonic() + LAST
        while self.gate.visits and time.monotonic() < until:
            time.sleep(LOOK)
        return left

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/health":
            fields: dict[str, Any] = {"status": self.state}
            if fields["status"] == "loading":
                fields["loaded"] = round(self.loaded, 3)
            status = 200 if fields["status"] == "ready" else 503
            await _whole(send, status, "application/json", json.dumps(fields))
        elif path == "/metrics":
            await _whole(send, 200, PROMETHEUS, self.metrics.text())
        elif self.router is None:
            raise Refused(503, f"the model is loading, {self.loaded:.0%} so far; try again", code="loading")
        else:
            await self.router.app(scope, receive, send)


async def _whole(send: Send, status: int, kind: str, text: str) -> None:
    body = text.encode()
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
