"""A client of an OpenAI-compatible server: sends a JSON body, returns an object or raises a one-line error.

The library `openai` (extra [teach]) sends requests and retries temporary failures: no connection, no or only
half an answer in time, 408, 409, 429 and 5xx. It waits 0.5, 1, 2, … 8 seconds, or Retry-After up to two
minutes. The remaining rules are here: each attempt is counted before it is sent; an answer has a deadline and
a size limit as a whole and is one JSON object; and the key goes nowhere else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

from unfreeze.teach.address import KEY, WORDS, EndpointError, base_url, is_here
from unfreeze.untrusted.json_object import MAX_BYTES, is_object, parse_object

# headers that no longer apply once the body is read
OF_BODY = ("content-encoding", "content-length", "transfer-encoding")
# headers that the library takes from the environment
FROM_ENVIRONMENT = ("openai-organization", "openai-project")


@dataclass
class _Post:
    """The cost of one post so far. reserve: called before each attempt.

    release: called after an attempt that had no connection, so that nothing was sent
    key: of the work that is asked for, "" without one; heard: attempts that had a status as their answer
    """

    reserve: Callable[[], None]
    release: Callable[[], None] = lambda: None
    key: str = ""
    tries: int = 0
    heard: int = 0
    answer: dict[str, Any] | None = None


_POST: ContextVar[_Post] = ContextVar("_POST")
"""The post that this thread waits for: the library passes only the request to its transport."""


class Client:
    """Posts to one server.

    url          http(s)://host[:port][/path]; /v1 is added if there is no path
    timeout      seconds for one whole answer
    tries        attempts per post
    environment  where the key is looked up
    """

    def __init__(
        self, url: str, *, timeout: float = 120.0, tries: int = 6, environment: Mapping[str, str] = os.environ
    ):
        self.url, self.timeout = base_url(url), timeout
        key, here = environment.get(KEY, ""), is_here(self.url)
        self._key = key if here or self.url.startswith("https:") else ""
        self._unsent = bool(key) and not self._key
        self._openai = openai.OpenAI(
            base_url=self.url,
            api_key="-",  # _Http sets the header, because it knows where the key may go
            max_retries=tries - 1,
            timeout=timeout,
            http_client=_Http(self._key, timeout, trust_env=not here),
        )

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        reserve: Callable[[], None] = lambda: None,
        *,
        release: Callable[[], None] = lambda: None,
        key: str = "",
    ) -> dict[str, Any]:
        """Post `body` to url/path and return the server's object. Raises EndpointError.

        reserve: called before each attempt, to count what may be billed (teach/budget.py).
        release: called after an attempt without a connection: it was not sent.
        key: sent as Idempotency-Key, so that a server that knows this header does not do the work twice,
        nor bill it, if an answer was lost. An attempt after a status gets another one: such a server would
        give the same status again.
        """
        post = _Post(reserve, release, key)
        outer = _POST.set(post)
        try:
            self._openai.post(f"/{path}", cast_to=httpx2.Response, body=body)
        except openai.APIStatusError as error:
            raise self._refused(path, error, post.tries) from None
        except openai.APIConnectionError as error:
            late = isinstance(error, openai.APITimeoutError)
            why = f"no whole answer in {self.timeout:g} seconds" if late else _words(error)
            raise EndpointError(
                f"{self.url}/{path}: {why}; {post.tries} tries",
                next="check that the server runs; the same command continues where this one ended",
                late=late,
                unheard=not late,
            ) from None
        finally:
            _POST.reset(outer)
        assert post.answer is not None, "a success has an answer"
        return post.answer

    def _refused(self, path: str, error: openai.APIStatusError, tries: int) -> EndpointError:
        """Return the error for an unsuccessful status, in the server's own words."""
        code, reply = error.status_code, _message(error.body)
        reply = reply.replace(self._key, "…") if self._key else reply
        words = f"the server answers {code}{f': {reply}' if reply else ''}"
        words += f"; {tries} tries" if tries > 1 else ""
        next = {
            401: f"set {KEY} to the server's key",
            403: f"set {KEY} to a key that may use this model",
            404: "an address that ends in /v1, and a model that the server has (its /v1/models lists them)",
        }.get(code, "")
        if 300 <= code < 400:
            next = "give the address that it leads to; nothing is sent on to another one"
        elif code in (401, 403) and self._unsent:
            next = f"https: {KEY} is not sent over http to another machine"
        elif code in (408, 409, 429) or code >= 500:
            next = "check that the server runs; the same command continues where this one ended"
        return EndpointError(f"{self.url}/{path}: {words}", next=next, status=code)


class _Http(openai.DefaultHttpxClient):
    """Sends one attempt: counted, to this address only, and read completely.

    trust_env: requests to this machine must not use a proxy from the environment
    """

    def __init__(self, key: str, seconds: float, *, trust_env: bool):
        super().__init__(timeout=seconds, follow_redirects=False, trust_env=trust_env)
        self._key, self._seconds = key, seconds

    def send(self, request: httpx2.Request, **_: Any) -> httpx2.Response:
        post = _POST.get()
        post.reserve()
        post.tries += 1
        for name in ("authorization", *FROM_ENVIRONMENT):
            request.headers.pop(name, None)
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        if post.key:
            request.headers["Idempotency-Key"] = f"{post.key}-{post.heard}"
        try:
            answer = self._whole(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            post.release()
            raise
        post.heard += 1
        if answer.is_success:
            try:
                post.answer = parse_object(answer.content, "the answer", EndpointError)
            except EndpointError as error:  # perhaps a proxy's page: the library retries
                raise httpx2.DecodingError(error.message, request=request) from None
        return answer

    def _whole(self, request: httpx2.Request) -> httpx2.Response:
        """Send, and read to the end. The library's timeouts restart with every byte; this one doesn't."""
        ends, read = time.monotonic() + self._seconds, bytearray()
        streamed = super().send(request, stream=True, follow_redirects=False)
        try:
            for part in streamed.iter_bytes():
                read += part
                if time.monotonic() > ends:
                    raise httpx2.ReadTimeout("no whole answer in time", request=request)
                if len(read) > MAX_BYTES:
                    words = f"{request.url}: the answer has more than {MAX_BYTES:,} bytes"
                    raise EndpointError(words)
        finally:
            streamed.close()
        headers = [item for item in streamed.headers.multi_items() if item[0].lower() not in OF_BODY]
        return httpx2.Response(streamed.status_code, headers=headers, content=bytes(read), request=request)


def _message(body: object) -> str:
    """Return the text inside {"message": …} and similar, whose "error" the library has removed; shortened."""
    text: Any = body
    for name in ("message", "detail"):
        text = text.get(name, text) if is_object(text) else text
    return (text if isinstance(text, str) else json.dumps(text) if text else "")[:WORDS]


def _words(error: openai.APIConnectionError) -> str:
    """Return the reason for a missing answer: the library only says "Connection error.", its cause more."""
    return str(error.__cause__ or error) or type(error.__cause__ or error).__name__
