"""The gate before every route: who may ask, how much, how long. An ASGI application around another.

In this order: an id; Host (against DNS rebinding); Origin (no page of a browser, unless named); the key; the
server's end; the body, in one framing, not packed, whole and at most so many bytes; the time of the answer.
Each refusal has OpenAI's shape. What fails inside is logged with its traceback under the request's id; the
answer names the id alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from unfreeze.core.errors import UserError
from unfreeze.serve.request import MAX_BODY, Refused
from unfreeze.serve.visit import EVENTS, VISIT, Visit

log = logging.getLogger("unfreeze.serve")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = dict[str, str]

OPEN = ("/health",)
"""Paths without a key: they tell nothing but loading or ready."""
BODY_SECONDS = 30.0
ENDING = "the server is ending; try again later"
METHODS = "GET, POST"
FAR = 60  # most seconds of Retry-After
PATH = re.compile(r"[/\\]")
"""Of a message with such a character nothing is sent: it may hold the path of a file."""


@dataclass(frozen=True)
class Rules:
    """Who may ask.

    hosts    names that a Host header may have, in lower case and without a port; an empty set: any
    any_ip   also every address in digits: a name that an attacker controls is none
    origins  pages of a browser that may ask, such as "http://localhost:3000"
    keys     sha256 of each key; empty: none is needed
    body     most bytes of a body; body_seconds: to send it
    seconds  of a request, from its head to the end of its answer
    """

    hosts: frozenset[str] = frozenset({"127.0.0.1", "localhost", "::1"})
    any_ip: bool = False
    origins: frozenset[str] = frozenset()
    keys: tuple[bytes, ...] = ()
    body: int = MAX_BODY
    body_seconds: float = BODY_SECONDS
    seconds: float = math.inf


def hashed(key: str) -> bytes:
    """Return the sha256 of a key, in UTF-8."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class Gate:
    """Refuses what the rules don't allow, and hands the rest to `app`.

    ended       called at the end of each request with its status (0: none was sent), its path and its Visit
    retry_after seconds for a client that comes too early
    draining    True: no new requests; those that run go on
    """

    def __init__(
        self,
        app: App,
        rules: Rules,
        *,
        ended: Callable[[int, str, Visit], None] = lambda status, path, visit: None,
        retry_after: Callable[[], int] = lambda: 1,
    ):
        self.app, self.rules, self.ended, self.retry_after = app, rules, ended, retry_after
        self.draining = False
        self.visits: dict[Visit, asyncio.Task[Any]] = {}
        """Requests that are being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        visit, path = Visit(), str(scope["path"])
        answer = Answer(send, visit, self.retry_after, scope.setdefault("state", {}))
        VISIT.set(visit)
        self.visits[visit] = cast("asyncio.Task[Any]", asyncio.current_task())
        try:
            answer.more = allowed(scope, self.rules)
            if scope["method"] == "OPTIONS" and answer.more:
                await answer.plain(204, {**answer.more, "access-control-max-age": "600"})
                return
            admitted(scope, self.rules)
            if self.draining and path not in OPEN:
                raise Refused(503, ENDING, code="draining")
            unpacked(scope)
            wrong = framing(scope)
            if wrong:
                answer.more["connection"] = "close"  # where the next request begins is not known
            body = await whole_body(scope, receive, self.rules)
            if wrong:  # read first: a socket that is closed before its bytes are read loses the answer
                raise Refused(400, wrong, code="wrong_framing")
            await self._handed_on(scope, body, receive, answer)
        except asyncio.CancelledError:
            if visit.words != "drained":
                raise
            await answer.refused(Refused(503, ENDING, code="draining"))
        except Refused as error:
            await answer.refused(error)
        except Exception as error:
            await answer.refused(fault(error))
        finally:
            visit.leave("done")
            self.visits.pop(visit)
            self.ended(answer.status, path, visit)

    async def _handed_on(self, scope: Scope, body: bytes, receive: Receive, answer: Answer) -> None:
        """Run the application until its answer is whole, the client is gone, or the time is over."""
        visit, over = answer.visit, asyncio.Event()
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def heard() -> Message:
            if parts:
                return parts.pop()
            await over.wait()
            return {"type": "http.disconnect"}

        async def watched() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            visit.leave("done" if answer.whole else "gone")
            over.set()

        watch = asyncio.ensure_future(watched())
        try:
            seconds = None if math.isinf(self.rules.seconds) else self.rules.seconds
            async with asyncio.timeout(seconds):
                await self.app(scope, heard, answer.send)
        except TimeoutError:
            visit.leave("too long")
            words = f"the answer was not whole after {self.rules.seconds:g} s, the server's limit"
            raise Refused(504, words, code="timeout") from None
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    def end_all(self) -> None:
        """End every request with 503, from another thread; its row is free at the next token."""
        for visit, task in list(self.visits.items()):
            visit.leave("drained")
            with suppress(RuntimeError):  # the loop has ended
                task.get_loop().call_soon_threadsafe(task.cancel)


class Answer:
    """The way back to the client; each answer gets the request's id.

    status  that was sent; 0: none yet
    whole   True once all of it was sent
    more    further headers, such as those for a page of a browser that may ask
    state   of the ASGI scope: tells the connection that events are streamed
    """

    def __init__(
        self, send: Send, visit: Visit, retry_after: Callable[[], int], state: MutableMapping[str, Any]
    ):
        self._send, self.visit, self._retry_after, self._state = send, visit, retry_after, state
        self.status, self.whole, self._events = 0, False, False
        self.more: Headers = {}

    async def send(self, message: Message) -> None:
        """Send a part of an answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = {"x-request-id": self.visit.id, **self.more}
            own = {bytes(name).lower(): bytes(value) for name, value in message.get("headers", ())}
            self._events = own.get(b"content-type", b"").startswith(b"text/event-stream")
            self._state[EVENTS] = self._events
            if self.status in (429, 503) and b"retry-after" not in own:
                headers["retry-after"] = str(max(1, min(FAR, self._retry_after())))
            message = {**message, "headers": [*message.get("headers", ()), *_raw(headers)]}
        elif not message.get("more_body", False):
            self.whole = True
        await self._send(message)

    async def plain(self, status: int, headers: Mapping[str, str]) -> None:
        """Send an answer without a body."""
        await self._send({"type": "http.response.start", "status": status, "headers": _raw(headers)})
        await self._send({"type": "http.response.body", "body": b""})
        self.status = status

    async def refused(self, error: Refused) -> None:
        """Send an error; where a stream has begun, as its last event. What is half sent else is cut off."""
        if self.whole or (self.status and not self._events):
            return
        body = json.dumps(error.body()).encode()
        if self.status:
            await self.send({"type": "http.response.body", "body": b"data: %s\n\n" % body})
            return
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        if error.status == 415:
            headers["accept-encoding"] = "identity"
        await self.send({"type": "http.response.start", "status": error.status, "headers": _raw(headers)})
        await self.send({"type": "http.response.body", "body": body})


def fault(error: Exception) -> Refused:
    """Log a fault of the server, and return what a client may know of it: never a path, never a traceback."""
    visit = VISIT.get()
    id = visit.id if visit else "no request"
    log.error("%s failed: %s", id, type(error).__name__, exc_info=error)
    known = error.message if isinstance(error, UserError) and not PATH.search(error.message) else ""
    words = f"{known or type(error).__name__}; the server's log has more under {id}"
    return Refused(500, words, code="internal_error")


def allowed(scope: Scope, rules: Rules) -> Headers:
    """Check Host and Origin. -> headers for a page that may ask. Raises Refused (400, 403).

    A page that a browser shows can have its own name resolved to 127.0.0.1 (DNS rebinding): its requests then
    have no foreign Origin, and only their Host tells.
    """
    hosts = _values(scope, b"host")
    if len(hosts) != 1:
        raise Refused(400, "a request needs one Host header")
    if rules.hosts and not _is_served(name_of(hosts[0]), rules):
        raise Refused(403, f"Host {hosts[0][:80]!r} is not an address of this server", code="wrong_host")
    origins = _values(scope, b"origin")
    if not origins:
        return {}
    if len(origins) != 1 or origins[0] not in rules.origins:
        raise Refused(
            403, f"Origin {origins[0][:80]!r} may not ask here; --allow-origin names those that may",
            code="wrong_origin",
        )  # fmt: skip
    return {
        "access-control-allow-origin": origins[0],
        "access-control-allow-methods": METHODS,
        "access-control-allow-headers": "authorization, content-type",
        "access-control-expose-headers": "x-request-id, retry-after",
        "vary": "origin",
    }


def name_of(host: str) -> str:
    """Return the name in a Host header: without the port, in lower case. With no true port: all of it."""
    host = host.strip().lower()
    whole = re.fullmatch(r"\[([^\]]*)(?:\](?::\d+)?)?|([^:]*)(?::\d+)?", host)
    return host if whole is None else whole[1] or whole[2] or ""


def _is_served(name: str, rules: Rules) -> bool:
    if name.removesuffix(".") in rules.hosts:
        return True
    with suppress(ValueError):
        return rules.any_ip and bool(ipaddress.ip_address(name))
    return False


def admitted(scope: Scope, rules: Rules) -> None:
    """Check the key. Raises Refused (401). It takes as long for every wrong one."""
    if not rules.keys or scope["path"] in OPEN:
        return
    kind, _, key = (_values(scope, b"authorization") or [""])[0].partition(" ")
    sent = hashed(key.strip())
    same = [hmac.compare_digest(sent, each) for each in rules.keys]
    if kind.lower() != "bearer" or not any(same):
        words = "there is no such key" if key else "a key is needed: Authorization: Bearer KEY"
        raise Refused(401, words, code="invalid_api_key")


def unpacked(scope: Scope) -> None:
    """Refuse a body that is packed (415): a few bytes of gzip can be gigabytes of JSON."""
    for kind in _values(scope, b"content-encoding"):
        if kind.strip().lower() not in ("", "identity"):
            words = f"Content-Encoding is {kind[:40]!r}: packed bodies are not read; send plain JSON"
            raise Refused(415, words, code="unsupported_encoding")


def framing(scope: Scope) -> str:
    """Return why a request's end is not certain; "" if it is.

    A proxy that goes by the other header would take a part of the body for the next request (smuggling,
    RFC 9112 6.1 and 6.3).
    """
    if not _values(scope, b"transfer-encoding"):
        return ""
    if _values(scope, b"content-length"):
        return "Content-Length and Transfer-Encoding are both there; send one of them"
    return "" if scope["http_version"] == "1.1" else "Transfer-Encoding needs HTTP/1.1"


async def whole_body(scope: Scope, receive: Receive, rules: Rules) -> bytes:
    """Read the body. Raises Refused: 413 for one that is too long, before it is read; 408 for a slow one."""
    length = (_values(scope, b"content-length") or ["0"])[0]
    if length.isdecimal() and int(length[:20]) > rules.body:
        raise Refused(413, _too_long(rules), code="body_too_long")
    body = bytearray()
    try:
        async with asyncio.timeout(rules.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the body is not whole")
                body += message.get("body", b"")
                if len(body) > rules.body:
                    raise Refused(413, _too_long(rules), code="body_too_long")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        words = f"the body was not whole after {rules.body_seconds:g} s"
        raise Refused(408, words, code="timeout") from None


def _too_long(rules: Rules) -> str:
    return f"the body has more than {rules.body:,} bytes"


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for each, value in scope["headers"] if each == name]


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
