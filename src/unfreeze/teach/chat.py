"""Answers of a model behind an OpenAI-compatible server: /v1/chat/completions, several at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from unfreeze.data.rows.row import Conversation
from unfreeze.teach.address import EndpointError
from unfreeze.teach.answers import REFUSED, Answer
from unfreeze.untrusted.json_object import is_list

if TYPE_CHECKING:
    from unfreeze.teach.client import Client

AT_ONCE = 8  # concurrent requests; a server batches them
BESIDE = 16  # approximate maximum of tokens that a template writes around one message


class ChatEndpoint:
    """Requests the next turn of conversations from a server.

    name      of the model on the server; "": its only one
    settings  max_tokens, temperature, top_p, stop, seed: sent unchanged
    reserve   (tokens read, maximum tokens written) of an attempt, before it is sent (teach/budget.py)
    """

    def __init__(
        self,
        client: Client,
        name: str,
        settings: dict[str, Any],
        reserve: Callable[[int, int], None] = lambda read, written: None,
    ):
        self.client, self.name, self.settings, self.reserve = client, name, settings, reserve

    def __call__(self, rows: Sequence[Conversation]) -> list[Answer | Exception]:
        """Return an answer or an error per row; one row's failure does not affect the others."""
        with ThreadPoolExecutor(min(AT_ONCE, len(rows))) as pool:
            waiting = [pool.submit(self.ask, row) for row in rows]
        faults = [each.exception() for each in waiting]
        if other := next((fault for fault in faults if fault and not isinstance(fault, Exception)), None):
            raise other
        return [
            fault if isinstance(fault, Exception) else each.result()
            for each, fault in zip(waiting, faults, strict=True)
        ]

    def ask(self, row: Conversation, *, key: str = "") -> Answer:
        """Return one answer. Raises EndpointError, and what `reserve` raises.

        key: of this request (teach/client.py: Client.post); "": none
        """
        read = most_tokens(row)
        answer = self.client.post(
            "chat/completions",
            body_of(row, self.name, self.settings),
            lambda: self.reserve(read, self.settings["max_tokens"]),
            key=key,
        )
        return answer_of(answer, f"{self.client.url}/chat/completions")


def body_of(row: Conversation, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request for the next turn. name: of the model, "": the server's only one."""
    body = {"messages": [_as_openai(message) for message in row.messages], **settings}
    body |= {"model": name} if name else {}
    return body | ({"tools": row.tools} if row.tools else {})


def answer_of(answer: dict[str, Any], where: str) -> Answer:
    """Read a server's object. Raises EndpointError if it holds no message. where: its address or file."""
    try:
        choice = answer["choices"][0]
        message, ended = choice["message"], choice.get("finish_reason")
        text, calls = message.get("content"), message.get("tool_calls")
        thought = message.get("reasoning_content") or message.get("reasoning")
        refusal = message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise EndpointError(
            f"{where}: its answer has no message: {json.dumps(answer)[:200]}",
            next="check that the address is of an OpenAI-compatible server",
        ) from None
    text, thought, refusal = (value if isinstance(value, str) else "" for value in (text, thought, refusal))
    about = {name: answer[name] for name in ("model", "usage") if answer.get(name)}
    if refusal and not text:
        return Answer(refusal, REFUSED, thought, about=about)
    return Answer(text, str(ended or "stop"), thought, calls if is_list(calls) else [], about)


def _as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """Return a row's message with tool-call arguments as JSON text."""
    if not (calls := message.get("tool_calls")):
        return message
    written: list[dict[str, Any]] = []
    for i, call in enumerate(calls):
        function = call["function"]
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        written.append({"id": f"call_{i}", **call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": written}


def most_tokens(row: Conversation) -> int:
    """Return an upper bound of a row's tokens for any tokenizer: one per byte, plus the template's."""
    text = json.dumps([row.messages, row.tools], ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(text) + BESIDE * (len(row.messages) + 1)
