"""Answers in OpenAI's JSON: chat.completion, and the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unfreeze.data.rows.row import Message
from unfreeze.generate.answer import Completion
from unfreeze.generate.request import Top

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer


def completion(
    model: str,
    prompt: Sequence[int],
    answers: Sequence[Completion],
    messages: Sequence[Message],
    logprobs: Sequence[Mapping[str, Any] | None],
) -> dict[str, Any]:
    """Return the object of a whole answer."""
    choices = [
        {
            "index": i,
            "message": as_openai(message),
            "logprobs": logprobs[i],
            "finish_reason": "tool_calls" if message.get("tool_calls") else answer.finish_reason,
        }
        for i, (answer, message) in enumerate(zip(answers, messages, strict=True))
    ]
    return {**head(model, "chat.completion"), "choices": choices, "usage": usage([prompt], answers)}


def head(model: str, kind: str) -> dict[str, Any]:
    """Return the first fields of an answer."""
    id = f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{secrets.token_hex(12)}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def usage(prompts: Sequence[Sequence[int]], answers: Sequence[Completion]) -> dict[str, int]:
    """Count tokens; a prompt counts once, whatever n is."""
    read, new = sum(map(len, prompts)), sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


def as_openai(message: Message) -> dict[str, Any]:
    """Return a message with the arguments of tool calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    content = message.get("content") or (None if calls else "")
    return {**message, "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}


class Spelled:
    """Tokens and their log-probabilities in the form of chat completions."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._texts: dict[int, tuple[str, list[int] | None]] = {}

    def answer(self, answer: Completion, top: Top | None) -> dict[str, Any]:
        """Return log-probabilities before temperature; top: the likeliest at each place, or None."""
        lists = top or [[] for _ in answer.tokens]
        content = [self.place(*each) for each in zip(answer.tokens, answer.logprobs, lists, strict=True)]
        return {"content": content, "refusal": None}

    def place(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, Any]:
        """Return one token, and the likeliest at its place: a token among them has the very number there."""
        logprob = dict(top).get(token, logprob)
        return {**self._token(token, logprob), "top_logprobs": [self._token(*each) for each in top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        if token not in self._texts:
            text, raw = self._tokenizer.decode([token], skip_specials=False), self._tokenizer.bytes_of(token)
            if raw is None and "\ufffd" not in text:  # else a part of a character
                raw = text.encode()
            self._texts[token] = text, None if raw is None else list(raw)
        text, spelled = self._texts[token]
        return {"token": text, "logprob": logprob, "bytes": spelled}


def chunk(
    about: Mapping[str, Any],
    index: int,
    delta: Mapping[str, Any],
    why: str | None,
    logprobs: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return an event of a stream."""
    listed = {"content": list(logprobs), "refusal": None} if logprobs else None
    choice = {"index": index, "delta": delta, "logprobs": listed, "finish_reason": why}
    return event({**about, "choices": [choice]})


def text_chunk(
    about: Mapping[str, Any], index: int, text: str, why: str | None, logprobs: Mapping[str, Any] | None
) -> str:
    """Return an event of a stream of /v1/completions."""
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": why}
    return event({**about, "choices": [choice]})


def event(value: Mapping[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"
