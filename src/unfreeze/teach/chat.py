"""The answers of a model behind an OpenAI-compatible server: /v1/chat/completions, several at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from unfreeze.data.rows.row import Conversation
from unfreeze.teach.address import EndpointError
from unfreeze.teach.answers import Answer
from unfreeze.untrusted.json_object import is_list

if TYPE_CHECKING:
    from unfreeze.teach.client import Client

AT_ONCE = 8  # requests; a server batches them
BESIDE = 16  # tokens at most that a template writes around one message, about


class ChatEndpoint:
    """Asks a server for the next turn of conversations.

    name      of the model on the server; "": the one it has
    settings  max_tokens, temperature, top_p, stop, seed: sent as they are
    reserve   (tokens read, tokens written at most) of a try, before it is sent (teach/budget.py)
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
        """An answer per row, or why it has none; all that came are here, whatever happened to others."""
        with ThreadPoolExecutor(min(AT_ONCE, len(rows))) as pool:
            waiting = [pool.submit(self._ask, row) for row in rows]
        faults = [each.exception() for each in waiting]
        if other := next((fault for fault in faults if fault and not isinstance(fault, Exception)), None):
            raise other
        return [
            fault if isinstance(fault, Exception) else each.result()
            for each, fault in zip(waiting, faults, strict=True)
        ]

    def _ask(self, row: Conversation) -> Answer:
        body = {"messages": [_as_openai(message) for message in row.messages], **self.settings}
        body |= {"model": self.name} if self.name else {}
        body |= {"tools": row.tools} if row.tools else {}
        read = most_tokens(row)
        answer = self.client.post(
            "chat/completions", body, lambda: self.reserve(read, self.settings["max_tokens"])
        )
        try:
            choice = answer["choices"][0]
            message, ended = choice["message"], choice.get("finish_reason")
            text, calls = message.get("content"), message.get("tool_calls")
            thought = message.get("reasoning_content") or message.get("reasoning")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise EndpointError(
                f"{self.client.url}/chat/completions: its answer has no message: {json.dumps(answer)[:200]}",
                next="see that the address is of an OpenAI-compatible server",
            ) from None
        text, thought = (value if isinstance(value, str) else "" for value in (text, thought))
        return Answer(text, str(ended or "stop"), thought, calls if is_list(calls) else [])


def _as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a row, with the arguments of tool calls as JSON text."""
    if not (calls := message.get("tool_calls")):
        return message
    written: list[dict[str, Any]] = []
    for i, call in enumerate(calls):
        function = call["function"]
        given = function.get("arguments")
        text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        written.append({"id": f"call_{i}", **call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": written}


def most_tokens(row: Conversation) -> int:
    """Tokens that a row can have at most, whatever the tokenizer: one a byte, and what a template writes."""
    said = json.dumps([row.messages, row.tools], ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(said) + BESIDE * (len(row.messages) + 1)
