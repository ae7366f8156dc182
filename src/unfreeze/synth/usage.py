"""A server's usage: its own count of the tokens that it bills.

    {"prompt_tokens": 12, "completion_tokens": 34, …}   reasoning is a part of completion_tokens

It is believed in so far as it can be true. More than was booked means that the server does not keep to
max_tokens, so no further request has a known price: the run stops. Less than the answer itself has is refused
and named; the request stays booked at its worst.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from unfreeze.synth.prompts import Count, Request
from unfreeze.teach.answers import Answer
from unfreeze.untrusted.json_object import is_object

LONGEST = 256
"""Bytes of one token, at most: the longest of known vocabularies, such as runs of 128 spaces, have fewer."""


class Usage(NamedTuple):
    """Tokens as the server counts them. fault: why they are refused, or ""; over: more than was booked."""

    read: int = 0
    written: int = 0
    fault: str = ""
    over: bool = False


def checked(request: Request, answer: Answer, count: Count | None) -> Usage:
    """Check the usage of an answer. count: tokens of a text by the model's tokenizer, or None."""
    held = answer.about.get("usage")
    if held is None:
        return Usage(fault="no usage")
    read, written = (_number(held, name) for name in ("prompt_tokens", "completion_tokens"))
    if read is None or written is None:
        return Usage(fault=f"usage is {held!r:.80}")
    if written > request.written:
        return Usage(
            read,
            written,
            f"usage says {written:,} tokens written; at most {request.written:,} were asked",
            True,
        )
    if read > request.read:
        return Usage(
            read, written, f"usage says {read:,} tokens read; the request has at most {request.read:,}", True
        )
    least = least_tokens(answer, count)
    if written < least:
        return Usage(read, written, f"usage says {written:,} tokens written; the answer alone has {least:,}")
    return Usage(read, written)


def least_tokens(answer: Answer, count: Count | None) -> int:
    """Return the least tokens that an answer and its reasoning have."""
    texts = [text for text in (answer.text, answer.reasoning) if text]
    if count:
        return sum(map(count, texts))
    return sum(-(-len(text.encode("utf-8", "surrogatepass")) // LONGEST) for text in texts)


def _number(held: Any, name: str) -> int | None:
    value = held.get(name) if is_object(held) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
