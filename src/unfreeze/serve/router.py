"""The routes of the endpoint, as a starlette application.

    POST /v1/chat/completions, /v1/completions    each request by itself
    GET  /v1/models, /v1/models/NAME
    POST /tokenize, /detokenize                   in vLLM's form; GET /tokenizer_info
    …    /s/SESSION/v1/…                          the same by a session's: base_url = …/s/SESSION/v1

Every answer is JSON; an error has OpenAI's shape. log-probabilities that a client sees are those before
temperature; a session records those after it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from unfreeze.core.errors import ConfigError, nearest
from unfreeze.generate.answer import Completion, Piece
from unfreeze.generate.request import Top
from unfreeze.serve import written
from unfreeze.serve.completions import Continue, Spelling, choices_of, logprobs_of, read_completion
from unfreeze.serve.deltas import Deltas
from unfreeze.serve.gate import fault
from unfreeze.serve.request import MAX_BODY, Asking, Chat, Refused, read_chat
from unfreeze.serve.session import Session, Speech, Turn
from unfreeze.serve.speaker import Speaker, Work
from unfreeze.serve.steer import Allow, steered
from unfreeze.serve.structured import Grammars, chat_grammar
from unfreeze.serve.tokenize import info_of, text_of, tokens_of

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer

ENDED = "this session has ended and takes no more requests"
MOST_HELD = 8192  # pieces that wait for the client of a stream
DEFAULT = "default"
"""A name of the base that is the same for every server."""

Result = tuple[list[Completion], list[Top]]
Talk = Speech | Session


class Router:
    """Answers requests by one engine.

    name      of the model, as /v1/models lists it
    talk      for requests without a session; None refuses them
    adapters  -> the names of the adapters that requests may name now
    default   the adapter that answers as "default" and where a request names no model; "": none
    sessions  name -> Session. Add and remove entries at any time
    """

    def __init__(
        self,
        speaker: Speaker,
        tokenizer: Tokenizer,
        name: str,
        talk: Speech | None = None,
        *,
        adapters: Callable[[], Iterable[str]] = tuple,
        default: str = "",
    ):
        self.speaker, self.tokenizer, self.name, self.talk = speaker, tokenizer, name, talk
        self.adapters, self.default = adapters, default
        self.sessions: dict[str, Talk] = {}
        routes = [
            Route(f"{prefix}{path}{slash}", _refusing(endpoint), methods=[method])
            for prefix in ("/v1", "/s/{session}/v1")
            for slash in ("", "/")
            for path, endpoint, method in (
                ("/chat/completions", self._chat, "POST"),
                ("/completions", self._complete, "POST"),
                ("/models", self._models, "GET"),
                ("/models/{name:path}", self._model, "GET"),
            )
        ]
        routes += [
            Route(f"{path}{slash}", _refusing(endpoint), methods=[method])
            for slash in ("", "/")
            for path, endpoint, method in (
                ("/tokenize", self._tokenize, "POST"),
                ("/detokenize", self._detokenize, "POST"),
                ("/tokenizer_info", self._tokenizer_info, "GET"),
            )
        ]
        faults: Mapping[Any, Any] = {Refused: _refusal, HTTPException: _no_route}
        self.app = Starlette(routes=routes, exception_handlers=faults)
        self.app.router.redirect_slashes = False  # a client that follows 307 may drop its key or its body
        num_ids = speaker.engine.num_ids
        self._num_ids, self._window = num_ids, speaker.engine.model.shape.max_positions
        self._grammars = Grammars(tokenizer, num_ids)

    # --- models

    def names(self) -> list[str]:
        """Return the names of the models, the base first."""
        return [self.name, *self.adapters()]

    def _listed(self, name: str) -> dict[str, Any]:
        parent = None if name == self.name else self.name
        about = {"id": name, "object": "model", "created": 0, "owned_by": "unfreeze"}
        return {**about, "parent": parent, "max_model_len": self._window}

    async def _models(self, request: Request) -> Response:
        self._talk(request)
        return JSONResponse({"object": "list", "data": [self._listed(name) for name in self.names()]})

    async def _model(self, request: Request) -> Response:
        self._talk(request)
        name = request.path_params["name"] or "(empty)"  # /v1/models/ names none
        self._adapter(name)
        return JSONResponse(self._listed((self.default or self.name) if name == DEFAULT else name))

    def _adapter(self, name: str | None, talk: Talk | None = None) -> str:
        """Return the adapter of a model's name; "" for the base. Raises Refused (404)."""
        if not name or name == DEFAULT:
            return self.default
        if name == self.name:
            return ""
        names = [self.name] if isinstance(talk, Session) else self.names()
        if name not in names:
            there = nearest(name, names) or f"; there is {', '.join(map(repr, names[:8]))}"
            words = f"model {name[:80]!r} is not here{there}"
            raise Refused(404, words, param="model", code="model_not_found")
        return name

    # --- tokens

    async def _tokenize(self, request: Request) -> Response:
        model, answer = tokens_of(await _body(request), self.tokenizer, self._window)
        self._adapter(model)
        return JSONResponse(answer)

    async def _detokenize(self, request: Request) -> Response:
        model, answer = text_of(await _body(request), self.tokenizer)
        self._adapter(model)
        return JSONResponse(answer)

    async def _tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(info_of(self.tokenizer, self._window))

    # --- chat completions

    async def _chat(self, request: Request) -> Response:
        talk = self._talk(request)
        chat = read_chat(await _body(request))
        adapter = self._adapter(chat.model, talk)
        turn = talk.begin(chat)
        work = self._work(turn, chat, adapter, await self._allowed(talk, chat, turn))
        model = adapter or self.name
        if chat.stream:
            stream = _Streamed(self, talk, [work])  # begun here: a refusal still has its status
            return _events(self._spoken(talk, turn, chat, stream, model))
        ((answers, tops),) = await self._answered(request, talk, [work])
        messages = talk.heard(turn, answers)
        logprobs = [
            self._spelled.answer(answer, tops[i] if tops else None) if chat.top is not None else None
            for i, answer in enumerate(answers)
        ]
        return JSONResponse(written.completion(model, turn.sample.ids, answers, messages, logprobs))

    async def _allowed(self, talk: Talk, chat: Chat, turn: Turn) -> Allow | None:
        """Return the mask of an answer that has a form. A thread compiles it: that may take a second."""
        if isinstance(talk, Session):
            return None
        grammar = chat_grammar(chat, talk.shape, turn.thought, self._grammars)
        if grammar is None:
            return None
        try:
            return await asyncio.to_thread(self._grammars.compiled, *grammar)
        except ConfigError as error:  # a library is absent
            raise Refused(400, f"{grammar[1]}: {error.message}; {error.next}", param=grammar[1]) from None

    async def _spoken(
        self, talk: Talk, turn: Turn, chat: Chat, stream: _Streamed, model: str
    ) -> AsyncIterator[str]:
        """Yield the events of a stream: text as it becomes certain, calls at the end."""
        about = _about(written.head(model, "chat.completion.chunk"), chat)
        speech, live = (talk.speech, False) if isinstance(talk, Session) else (talk, True)
        parts = [
            Deltas(self.tokenizer, speech.shape, turn.thought, chat.stop, tools=bool(turn.tools), live=live)
            for _ in range(chat.n)
        ]
        listed: list[list[dict[str, Any]]] = [[] for _ in parts]  # log-probabilities that no event has yet
        async with stream:
            for i in range(chat.n):
                yield written.chunk(about, i, {"role": "assistant", "content": ""}, None)
            async for _, piece in stream:
                i = piece.row
                if chat.top is not None:
                    listed[i].append(self._spelled.place(piece.token, piece.logprob, piece.top))
                if delta := parts[i].push(piece):
                    yield written.chunk(about, i, delta, None, listed[i])
                    listed[i] = []
            ((answers, _),) = stream.results()
            messages = talk.heard(turn, answers)
            for i, (answer, message) in enumerate(zip(answers, messages, strict=True)):
                for delta in parts[i].rest(message):
                    yield written.chunk(about, i, delta, None, listed[i])
                    listed[i] = []
                why = "tool_calls" if message.get("tool_calls") else answer.finish_reason
                yield written.chunk(about, i, {}, why, listed[i])
            if chat.usage:
                usage = written.usage([turn.sample.ids], answers)
                yield written.event({**about, "choices": [], "usage": usage})

    # --- completions

    async def _complete(self, request: Request) -> Response:
        talk = self._talk(request)
        asks = read_completion(await _body(request), self.tokenizer, self._num_ids)
        adapter = self._adapter(asks.model, talk)
        model = adapter or self.name
        turns = [talk.begin_text(asks, i) for i in range(len(asks.prompts))]
        works = [self._work(turn, asks, adapter, None) for turn in turns]
        if asks.echo and asks.top is not None:
            for work in works:
                work.prompt_logprobs = True
        if asks.stream:
            stream = _Streamed(self, talk, works)
            return _events(self._continued(talk, turns, asks, stream, model))
        results = await self._answered(request, talk, works)
        for turn, (answers, _) in zip(turns, results, strict=True):
            talk.heard_text(turn, answers)
        choices = [
            choice
            for i, (work, (answers, tops)) in enumerate(zip(works, results, strict=True))
            for choice in choices_of(asks, i, answers, tops, work.prompt_scores, self._spelling)
        ]
        usage = written.usage(asks.prompts, [each for answers, _ in results for each in answers])
        return JSONResponse({**written.head(model, "text_completion"), "choices": choices, "usage": usage})

    async def _continued(
        self, talk: Talk, turns: Sequence[Turn], asks: Continue, stream: _Streamed, model: str
    ) -> AsyncIterator[str]:
        """Yield the events of a stream of continued texts."""
        about = _about(written.head(model, "text_completion"), asks)
        held: dict[int, list[Piece]] = {}  # pieces whose text is not certain yet
        ends = {}
        async with stream:
            async for number, piece in stream:
                i = number * asks.n + piece.row
                pieces = held.setdefault(i, [])
                pieces.append(piece)
                text = piece.text
                if text or piece.finish_reason:
                    logprobs = self._text_logprobs(asks, pieces, ends.get(i, 0))
                    ends[i] = ends.get(i, 0) + len(text)
                    yield written.text_chunk(about, i, text, piece.finish_reason, logprobs)
                    held[i] = []
            results = stream.results()
            for turn, (answers, _) in zip(turns, results, strict=True):
                talk.heard_text(turn, answers)
            if asks.usage:
                answers = [each for answers, _ in results for each in answers]
                yield written.event({**about, "choices": [], "usage": written.usage(asks.prompts, answers)})

    def _text_logprobs(self, asks: Continue, pieces: Sequence[Piece], start: int) -> dict[str, Any] | None:
        if asks.top is None:
            return None
        tops = [piece.top if asks.top else None for piece in pieces]
        tokens, values = [piece.token for piece in pieces], [piece.logprob for piece in pieces]
        return logprobs_of(tokens, values, tops, self._spelling, start)

    # --- the engine

    def _work(self, turn: Turn, asks: Asking, adapter: str, allowed: Allow | None) -> Work:
        allow = steered(asks, self.tokenizer.eos_ids, self._num_ids, allowed)
        work = Work(turn.sample.ids, turn.sampling, turn.most, turn.experts, asks.top or 0)
        work.adapter, work.allow = adapter, allow
        work.logprobs = asks.top is not None or turn.recorded
        return work

    async def _answered(self, request: Request, talk: Talk, works: Sequence[Work]) -> list[Result]:
        """Wait for the answers to all; if the client leaves, nobody waits any more."""
        left = asyncio.ensure_future(_left(request))
        for work in works:
            work.gone = lambda: left.done() or talk.ended
        try:
            waiting = self._submitted(works)
            whole = asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.wait((whole, left), return_when=asyncio.FIRST_COMPLETED)
            await whole
            return [self._result(each) for each in waiting]
        finally:
            left.cancel()
            with suppress(asyncio.CancelledError):
                await left

    def _submitted(self, works: Sequence[Work]) -> list[asyncio.Future[Result]]:
        """Hand works to the engine: all, or none if it refuses one."""
        waiting: list[asyncio.Future[Result]] = []
        if len(works) > max(1, most := self.speaker.max_wait):
            words = f"prompt: {len(works):,} prompts; this server lets {most:,} wait: send fewer at once"
            raise Refused(400, words, param="prompt")
        try:
            for work in works:
                waiting.append(asyncio.wrap_future(self.speaker.submit(work)))
        except BaseException:
            for each in waiting:
                each.cancel()
            raise
        return waiting

    def _result(self, waiting: asyncio.Future[Result]) -> Result:
        if waiting.cancelled():  # the client is gone, or the session has ended
            raise Refused(410, ENDED)
        return waiting.result()

    def _talk(self, request: Request) -> Talk:
        """Return the session of the path. Raises Refused: 404 if there is none, 410 if it has ended."""
        name = request.path_params.get("session")
        talk = self.talk if name is None else self.sessions.get(name)
        if talk is None:
            raise Refused(404, "there is no such session" if name else "requests here need a session")
        if talk.ended:
            raise Refused(410, ENDED)
        return talk

    @cached_property
    def _spelled(self) -> written.Spelled:
        return written.Spelled(self.tokenizer)

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.tokenizer)


class _Streamed:
    """Works whose pieces come as they are sampled: (number of the work, piece).

    Leaving the context tells the engine that nobody waits.
    """

    def __init__(self, router: Router, talk: Talk, works: Sequence[Work]):
        self._router, self._gone = router, False
        self._pieces: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(number: int) -> Callable[[Piece], None]:
            return lambda piece: _thread_safe(loop, self._put, (number, piece))

        for number, work in enumerate(works):
            work.heard, work.gone = listener(number), lambda: self._gone or talk.ended
        self._waiting = router._submitted(works)
        left = itertools.count(len(works) - 1, -1)
        for each in self._waiting:
            each.add_done_callback(lambda _: self._pieces.put_nowait(None) if next(left) == 0 else None)

    def _put(self, each: tuple[int, Piece]) -> None:
        """Keep a piece until the client takes it; one that takes none holds nobody for long."""
        if self._pieces.qsize() < MOST_HELD:
            self._pieces.put_nowait(each)
        else:
            self._gone = True

    async def __aenter__(self) -> _Streamed:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gone = True
        for each in self._waiting:
            each.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        while (each := await self._pieces.get()) is not None:
            yield each

    def results(self) -> list[Result]:
        """Return the answers, once the pieces are over. Raises the fault of the first that has one."""
        return [self._router._result(each) for each in self._waiting]


def _thread_safe(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    with suppress(RuntimeError):  # the loop has ended: nobody waits
        loop.call_soon_threadsafe(function, *args)


def _events(lines: AsyncIterator[str]) -> Response:
    async def whole() -> AsyncIterator[str]:
        try:
            async for line in lines:
                yield line
        except Exception as error:
            yield written.event(_fault(error).body())
        finally:
            await lines.aclose()  # type: ignore[attr-defined]  # the client is gone: so is the row
        yield "data: [DONE]\n\n"

    return StreamingResponse(whole(), media_type="text/event-stream")


def _about(head: Mapping[str, Any], asks: Asking) -> dict[str, Any]:
    """Return the fields of every event of a stream."""
    return {**head, "usage": None} if asks.usage else dict(head)


def _refusing(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Make every fault of an endpoint an answer in OpenAI's shape."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            raise _fault(error) from None

    return answer


async def _left(request: Request) -> None:
    """Return when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
    """A fault of ours: its kind and the request's id; the log has the rest. The connection stays."""
    return error if isinstance(error, Refused) else fault(error)
