"""A client of an OpenAI-compatible server: a JSON body out, an object back, or one line that says why not.

The standard library does it: one POST, with a deadline for the whole of it. What may pass is tried again: no
connection, no answer in time, half an answer, 408, 409, 425, 429 and 5xx. Each time the wait doubles, or is
what Retry-After says. What will not pass by waiting (400, 401, 403, 404, 422) is said at once, in the
server's own words.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.untrusted.json_object import MAX_BYTES, parse_object

KEY = "OPENAI_API_KEY"
"""The environment variable with the key, which is written nowhere, and sent by https or to this machine."""
PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds between two tries
WORDS = 300  # characters of a server's own words that are shown

T = TypeVar("T")


class EndpointError(UserError):
    """A server that doesn't answer, refuses, or answers what cannot be.

    status: of its answer; None where there was none.
    """

    def __init__(self, message: str, *, next: str = "", status: int | None = None):
        super().__init__(message, next=next)
        self.status = status


class _Passing(Exception):
    """A fault that another try may not have. wait: what the server asks for, in seconds."""

    def __init__(self, words: str, wait: float | None = None):
        super().__init__(words)
        self.wait = wait


class Client:
    """Posts to one server.

    url      http(s)://host[:port][/path]; /v1 is added where no path is given
    timeout  seconds for the whole of one answer
    tries    of one post
    sleep    waits some seconds (a test counts them)
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 120.0,
        tries: int = 6,
        sleep: Callable[[float], None] = time.sleep,
        environment: Mapping[str, str] = os.environ,
    ):
        self.url = base_url(url)
        self.timeout, self.tries, self.sleep = timeout, tries, sleep
        key = environment.get(KEY, "")
        self._key = key if self.url.startswith("https:") or is_here(self.url) else ""
        self._unsent = bool(key) and not self._key
        # what goes to this machine goes through no proxy of the environment
        proxies = [urllib.request.ProxyHandler({})] if is_here(self.url) else []
        self._open = urllib.request.build_opener(_NoRedirect, *proxies).open

    def post(
        self, path: str, body: Mapping[str, Any], reserve: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The object that the server answers to `body` at url/path. Raises EndpointError.

        reserve: called before each try; what may be billed is counted there (teach/budget.py).
        """
        raw, wait = json.dumps(body).encode(), FIRST_WAIT
        for tried in range(1, self.tries + 1):
            reserve()
            try:
                return within(self.timeout, lambda: self._once(path, raw))
            except _Passing as fault:
                if tried == self.tries:
                    raise EndpointError(
                        f"{self.url}/{path}: {fault}; {tried} tries",
                        next="see that the server runs; the same command continues where this one ended",
                    ) from None
                self.sleep(wait if fault.wait is None else min(fault.wait, LONGEST_WAIT))
                wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError("tries is at least 1")

    def _once(self, path: str, raw: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(f"{self.url}/{path}", raw, headers, method="POST")
        try:
            with self._open(request, timeout=self.timeout) as answer:
                text, size = answer.read(MAX_BYTES + 1), answer.headers.get("Content-Length", "")
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from None
        except TimeoutError:
            raise _Passing(f"no answer in {self.timeout:g} seconds") from None
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            raise _Passing(_words(getattr(error, "reason", None) or error)) from None
        if len(text) > MAX_BYTES:
            raise EndpointError(f"{self.url}/{path}: an answer of more than {MAX_BYTES:,} bytes is not read")
        if size.isdigit() and len(text) < int(size):  # a read of so many bytes ends early without an error
            raise _Passing(f"half an answer: {len(text):,} of {int(size):,} bytes")
        try:
            return parse_object(text, "the answer", EndpointError)
        except EndpointError as error:
            raise _Passing(error.message) from None

    def _refused(self, path: str, error: urllib.error.HTTPError) -> Exception:
        """What a status that is no success means: _Passing, or an EndpointError with the server's words."""
        try:
            said = error.read(100_000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            said = ""
        said = f": {_message(said)}" if said.strip() else ""
        if self._key:
            said = said.replace(self._key, "…")
        words = f"the server answers {error.code}{said}"
        if error.code in PASSING:
            return _Passing(words, _seconds(error.headers.get("Retry-After")))
        next = {
            401: f"set {KEY} to the server's key",
            403: f"set {KEY} to a key that may use this model",
            404: "an address that ends in /v1, and a model that the server has (its /v1/models lists them)",
        }.get(error.code, "")
        if 300 <= error.code < 400:
            next = "give the address that it leads to; nothing is sent on to another one"
        elif error.code in (401, 403) and self._unsent:
            next = f"https: {KEY} is not sent over http to another machine"
        return EndpointError(f"{self.url}/{path}: {words}", next=next, status=error.code)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key goes only where it was sent: a redirect is an error."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def within(seconds: float, call: Callable[[], T]) -> T:
    """call(), in a thread that is left alone after so many seconds. Raises what it raises, or _Passing.

    A timeout of the socket alone begins anew with every byte, so a server that sends one now and then would
    hold a run for ever.
    """
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:  # it is raised where the answer is awaited
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = done.get(timeout=seconds)
    except queue.Empty:
        raise _Passing(f"no whole answer in {seconds:g} seconds") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def is_url(name: str) -> bool:
    """Whether a model's or teacher's name is a server's address."""
    return name.startswith(("http://", "https://"))


def base_url(url: str) -> str:
    """The address without a closing slash, with /v1 where it has no path.

    Raises ConfigError for one without a host, and for one with a name, a password or a query: it would stand
    in records and messages.
    """
    try:
        parts = urlsplit(url)
        port = parts.port  # a number within its range, or ValueError
    except ValueError as error:
        raise ConfigError(f"{url!r} is no address: {error}", next="http://127.0.0.1:8000/v1") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a server", next="http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "a server's address has no name, password or query: it stands in records and messages",
            next=f"the address alone; a key comes from the environment variable {KEY}",
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{path}"


def is_here(url: str) -> bool:
    """Whether the address is of this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own(url: str) -> bool:
    """Whether the address is of this machine or of a private network: nobody sends a bill for it."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:  # a name: without a dot, or under a suffix that is never delegated
        return "." not in host or host.endswith((".local", ".internal", ".lan", ".localhost"))


def _message(said: str) -> str:
    """The words inside {"error": {"message": …}} and its kin; else the text itself, cut."""
    try:
        found: Any = json.loads(said)
    except (ValueError, RecursionError):
        return said[:WORDS]
    for name in ("error", "message", "detail"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return (found if isinstance(found, str) else json.dumps(found))[:WORDS]


def _words(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, http.client.IncompleteRead):  # of an answer in chunks
        return f"half an answer: {len(error.partial):,} bytes"
    return str(error) or type(error).__name__


def _seconds(value: str | None) -> float | None:
    """Retry-After where it is a number of seconds (it may be a date, which is not followed)."""
    return float(value) if value and value.strip().isdigit() else None
