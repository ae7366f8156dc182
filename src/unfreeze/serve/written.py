"""Answers in OpenAI's JSON: chat.completion, and the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unfreeze.data.rows.row import Message
from unfreeze.generate.answer import Completion
from unfreeze.serve.speaker import Top

Spell = Callable[[int], str]
"""An id -> its text, special tokens spelled out."""


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
    return {**head(model, "chat.completion"), "choices": choices, "usage": usage(prompt, answers)}


def head(model: str, kind: str) -> dict[str, Any]:
    """Return the first fields of an answer."""
    id = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def usage(prompt: Sequence[int], answers: Sequence[Completion]) -> dict[str, int]:
    """Count tokens; a prompt counts once, whatever n is."""
    new = sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": len(prompt), "completion_tokens": new, "total_tokens": len(prompt) + new}


def as_openai(message: Message) -> dict[str, Any]:
    """Return a message with the arguments of tool calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    content = message.get("content") or (None if calls else "")
    return {**message, "content": content, "refusal": None, **({"tool_calls": calls} if calls else {})}


def logprobs_of(answer: Completion, top: Top | None, spell: Spell) -> dict[str, Any]:
    """Return log-probabilities before temperature; top: the likeliest at each place, or None."""
    content = [
        {
            **_token(token, logprob, spell),
            "top_logprobs": [_token(*each, spell) for each in (top[i] if top else [])],
        }
        for i, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True))
    ]
    return {"content": content, "refusal": None}


def _token(token: int, logprob: float, spell: Spell) -> dict[str, Any]:
    text = spell(token)
    whole = "\ufffd" not in text  # else a part of a character
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}


def chunk(about: Mapping[str, Any], index: int, delta: Mapping[str, Any], why: str | None) -> str:
    """Return an event of a stream."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": why}
    return event({**about, "choices": [choice]})


def event(value: Mapping[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def rest_of(
    about: Mapping[str, Any], answers: Sequence[Completion], messages: Sequence[Message], sent: bool
) -> Iterator[str]:
    """Yield the last events of each choice. sent: its text was streamed already."""
    for i, (answer, message) in enumerate(zip(answers, messages, strict=True)):
        whole = {name: value for name, value in as_openai(message).items() if name not in ("role", "refusal")}
        if calls := whole.get("tool_calls"):
            whole["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        if not sent and whole:
            yield chunk(about, i, whole, None)
        yield chunk(about, i, {}, "tool_calls" if calls else answer.finish_reason)
