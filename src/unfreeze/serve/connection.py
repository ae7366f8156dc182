"""A connection that nobody can hold by being slow: limits on bytes and seconds around uvicorn's HTTP/1.1.

A client has so many seconds to send a request's head, and to take what was written to it: the transport stops
taking more at 64 KiB (back-pressure), and if that is not read in time the connection is cut. The body's time
is the gate's (gate.py). What is not HTTP gets an error in OpenAI's shape, then the end.

A client may end its own sending and wait for the answer (shutdown(SHUT_WR)). On the wire that is the same as
a socket that was closed: both send FIN. Only a byte that is sent to the latter comes back as an error. So
such a client gets a few bytes that mean nothing: 100 Continue before an answer, a comment in a stream.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from unfreeze.serve.visit import EVENTS

HEAD_BYTES = 32_768  # of a request's first line and headers
KEPT = 5  # seconds that a connection may be idle between two requests
BUFFERED = 65_536  # bytes written to a client that it has not taken; then its stream waits
LOOK = 0.25  # seconds between two looks at a client that sends no more
WORDS = 4  # each word to it comes after so many times the seconds of the one before: 0, 4, 16, 64 …
ALIVE = ("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)
"""The kernel asks a silent peer after 30 s, then each 10 s; without three answers it is gone."""
NOT_WHOLE = "the request is not whole"


@dataclass(frozen=True)
class Patience:
    """Seconds that a client may take, and how many connections there may be.

    head   to send the head of a request
    take   to take what was written, when the connection is full or closes
    linger  to send the rest of a body that was refused, before the connection is cut
    """

    head: float = 10.0
    take: float = 30.0
    linger: float = 2.0
    connections: int = 4096


def connection(patience: Patience) -> type[H11Protocol]:
    """Return the protocol's class for uvicorn."""
    return type("Connection", (Connection,), {"patience": patience})


class Connection(H11Protocol):
    """uvicorn's connection, with `patience`."""

    patience = Patience()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the time for the first head; refuse a connection too many."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._half = False  # the client sends no more
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=BUFFERED)
        _ask_if_alive(transport.get_extra_info("socket"))
        if len(self.connections) > self.patience.connections:
            self._refuse(503, "the server has too many connections", b"retry-after: 1\r\n")
            return
        self._in("head", self.patience.head, self._slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget every timer."""
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Take bytes; each head has its time from the first byte on."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._between():
            if "head" not in self._timers:
                self._in("head", self.patience.head, self._slow_head)
        else:
            self._stop("head")
        if self.conn.their_state is not h11.SEND_BODY:
            self._stop("linger")

    def eof_received(self) -> bool:
        """Answer what a client has sent whole before it ended its sending. -> True while an answer is due."""
        if self.transport.is_closing() or not self._due():
            return False
        if not self._half:
            self._half = True
            self._look(0.0, 0.0)
        return True

    def on_response_complete(self) -> None:
        """Give a body that was refused a moment to end, and a client that closes time to take the answer."""
        super().on_response_complete()
        if self._half and not self.transport.is_closing():
            self._due()
        if self.transport.is_closing():
            self._in("take", self.patience.take, self.transport.abort)
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is not h11.SEND_RESPONSE:
            self._in("linger", self.patience.linger, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; what was written may still be taken for a while."""
        super().timeout_keep_alive_handler()
        self._in("take", self.patience.take, self.transport.abort)

    def pause_writing(self) -> None:
        """Wait for a client that reads slowly, but not for ever."""
        super().pause_writing()
        self._in("take", self.patience.take, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: it has taken what was written."""
        super().resume_writing()
        self._stop("take")

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP; uvicorn's own answer is plain text, and fails inside another answer."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        self._refuse(400, "the request is not valid HTTP/1.1", b"")

    def _due(self) -> bool:
        """True if a whole request still waits for its answer; else refuse what is not whole, and close."""
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        if answering and not cycle.more_body:
            return True
        if (answering and not cycle.response_started) or (self._between() and self._rest()):
            self._refuse(400, NOT_WHOLE, b"")
        else:
            self.transport.close()
        return False

    def _look(self, age: float, word: float) -> None:
        """Cut a client that has closed. age: seconds since it sent its last; word: when it gets the next."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if age >= word:
            self._send_word()
            word = max(1.0, word) * WORDS
        self._in("look", LOOK, lambda: self._look(age + LOOK, word))

    def _send_word(self) -> None:
        """Write a few bytes that mean nothing: the kernel of a client that is gone answers with an error."""
        cycle = self.cycle
        if self.transport.get_write_buffer_size() or self.conn.our_state is h11.ERROR:
            return  # there are bytes on their way, or none can be sent
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        elif cycle.scope.get("state", {}).get(EVENTS):
            event = h11.Data(data=b":\n\n")
        else:
            return
        self.transport.write(self.conn.send(event) or b"")

    def _rest(self) -> bytes:
        return self.conn.trailing_data[0].strip()

    def _between(self) -> bool:
        """True while no request is being answered: what comes is the head of the next."""
        return (self.cycle is None or self.cycle.response_complete) and self.conn.their_state is h11.IDLE

    def _slow_head(self) -> None:
        if self._between() and self.conn.trailing_data[0]:
            self._refuse(408, "the head of the request did not come in time", b"")
        elif self._between():  # nothing was sent: an answer would be taken for that to a later request
            self.transport.close()

    def _refuse(self, status: int, words: str, more: bytes) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        error: dict[str, Any] = {"message": words, "type": kind, "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        phrase = {400: b"Bad Request", 408: b"Request Timeout", 503: b"Service Unavailable"}[status]
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\n%s" % (
            status,
            phrase,
            more,
        )
        self.transport.write(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))
        self.transport.close()
        self._in("take", self.patience.take, self.transport.abort)

    def _in(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, self._now, name, then)

    def _now(self, name: str, then: Callable[[], None]) -> None:
        self._timers.pop(name, None)
        then()

    def _stop(self, name: str) -> None:
        """Stop a timer, if it runs."""
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def _ask_if_alive(connected: socket.socket) -> None:
    """Let the kernel look whether a silent peer is still there. It is not, if its machine or its way is."""
    if connected.family in (socket.AF_INET, socket.AF_INET6):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ALIVE:
            if hasattr(socket, name):  # not every system has them
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
