"""The routes of the endpoint, as a starlette application.

    POST /v1/chat/completions            each request by itself
    GET  /v1/models
    POST /s/SESSION/v1/chat/completions  by a session's: base_url = http://127.0.0.1:PORT/s/SESSION/v1
    GET  /s/SESSION/v1/models

Every answer is JSON; an error has OpenAI's shape. log-probabilities that a client sees are those before
temperature; a session records those after it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from unfreeze.core.errors import UserError
from unfreeze.generate.answer import Completion, Piece
from unfreeze.serve import written
from unfreeze.serve.request import MAX_BODY, Chat, Refused, read_chat
from unfreeze.serve.session import Session, Speech, Turn
from unfreeze.serve.speaker import Speaker, Top, Work

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer

LOOK = 0.2  # seconds between two looks for a client that is gone
ENDED = "this session has ended and takes no more requests"


class Router:
    """Answers requests by one engine.

    name      of the model, as /v1/models lists it
    talk      for requests without a session; None refuses them
    sessions  name -> Session. Add and remove entries at any time
    """

    def __init__(self, speaker: Speaker, tokenizer: Tokenizer, name: str, talk: Speech | None = None):
        self.speaker, self.tokenizer, self.name, self.talk = speaker, tokenizer, name, talk
        self.sessions: dict[str, Speech | Session] = {}
        routes = [
            Route(f"{prefix}{path}", endpoint, methods=[method])
            for prefix in ("/v1", "/s/{session}/v1")
            for path, endpoint, method in (
                ("/chat/completions", self._chat, "POST"),
                ("/models", self._models, "GET"),
            )
        ]
        faults: Mapping[Any, Any] = {Refused: _refusal, HTTPException: _no_route}
        self.app = Starlette(routes=routes, exception_handlers=faults)

    async def _models(self, request: Request) -> Response:
        self._talk(request)
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "unfreeze"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        try:
            return await self._answered(request)
        except Exception as error:
            raise _fault(error) from None

    async def _answered(self, request: Request) -> Response:
        talk = self._talk(request)
        chat = read_chat(await _body(request))
        if chat.model and chat.model not in (self.name, "default"):
            raise Refused(
                404,
                f"model {chat.model!r} is not here; there is {self.name!r}",
                param="model",
                code="model_not_found",
            )
        turn = talk.begin(chat)
        work = Work(turn.sample.ids, turn.sampling, turn.most, turn.experts, chat.top or 0)
        if chat.stream:
            return self._streamed(talk, turn, chat, work)
        gone = False
        work.gone = lambda: gone or talk.ended
        waiting = asyncio.wrap_future(self.speaker.submit(work))
        while not (await asyncio.wait([waiting], timeout=LOOK))[0]:
            gone = await request.is_disconnected()
        answers, tops = self._result(waiting)
        messages = talk.heard(turn, answers)
        logprobs = [
            written.logprobs_of(answer, tops[i] if tops else None, self._spell)
            if chat.top is not None
            else None
            for i, answer in enumerate(answers)
        ]
        return JSONResponse(written.completion(self.name, turn.sample.ids, answers, messages, logprobs))

    def _streamed(self, talk: Speech | Session, turn: Turn, chat: Chat, work: Work) -> Response:
        """Send text as it becomes certain; where there are tools, the whole message at its end."""
        if chat.top is not None:
            raise Refused(400, "logprobs: a stream has none; leave out stream or logprobs", param="logprobs")
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        gone = False

        def heard(piece: Piece | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        work.heard, work.gone = heard, lambda: gone or talk.ended
        waiting = asyncio.wrap_future(self.speaker.submit(work))
        waiting.add_done_callback(lambda _: pieces.put_nowait(None))

        async def events() -> AsyncIterator[str]:
            nonlocal gone
            about = written.head(self.name, "chat.completion.chunk")
            try:
                for i in range(chat.n):
                    yield written.chunk(about, i, {"role": "assistant", "content": ""}, None)
                while (piece := await pieces.get()) is not None:
                    if piece.text and not chat.tools:
                        yield written.chunk(about, piece.row % chat.n, {"content": piece.text}, None)
                answers, _ = self._result(waiting)
                for line in written.rest_of(about, answers, talk.heard(turn, answers), not chat.tools):
                    yield line
                if chat.usage:
                    yield written.event(
                        {**about, "choices": [], "usage": written.usage(turn.sample.ids, answers)}
                    )
            except Exception as error:
                yield written.event(_fault(error).body())
            finally:
                gone = True
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def _talk(self, request: Request) -> Speech | Session:
        """Return the session of the path. Raises Refused: 404 if there is none, 410 if it has ended."""
        name = request.path_params.get("session")
        talk = self.talk if name is None else self.sessions.get(name)
        if talk is None:
            raise Refused(404, "there is no such session" if name else "requests here need a session")
        if talk.ended:
            raise Refused(410, ENDED)
        return talk

    def _result(
        self, waiting: asyncio.Future[tuple[list[Completion], list[Top]]]
    ) -> tuple[list[Completion], list[Top]]:
        if waiting.cancelled():  # the client is gone, or the session has ended
            raise Refused(410, ENDED)
        return waiting.result()

    @functools.cached_property
    def _spell(self) -> Callable[[int], str]:
        return functools.cache(lambda id: self.tokenizer.decode([id], skip_specials=False))


async def _body(request: Request) -> bytes:
    """Read at most MAX_BODY bytes."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise Refused(413, f"the body has more than {MAX_BODY:,} bytes")
    except ClientDisconnect:
        raise Refused(400, "the body is not whole") from None
    return bytes(body)


async def _refusal(request: Request, error: Refused) -> Response:
    return JSONResponse(error.body(), status_code=error.status)


async def _no_route(request: Request, error: HTTPException) -> Response:
    words = f"{request.method} {request.url.path[:80]}: {error.detail}"
    return JSONResponse(Refused(error.status_code, words).body(), status_code=error.status_code)


def _fault(error: Exception) -> Refused:
    """A fault of ours: its kind, without a traceback. The connection stays."""
    words = error.message if isinstance(error, UserError) else type(error).__name__
    return error if isinstance(error, Refused) else Refused(500, words)
