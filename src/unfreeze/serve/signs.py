"""Text of an answer in which a special token cannot be taken for its spelling.

Reasoning, calls and content are told apart in the text of an answer, and some of their marks are special
tokens. But a model can also spell such a text in ordinary tokens, in a JSON string for instance: that is
content. So here a special token is a *sign*: the two halves of a surrogate pair, which hold its id and which
no decoded text has.

    sign(id) = U+D800 + id // 1024, U+DC00 + id % 1024        ids below 2^20
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer

SIGN = re.compile("[\ud800-\udbff][\udc00-\udfff]")
GUARDS = [chr(0xFDD0 + i) for i in range(32)]
"""Characters of Unicode that are for a program's own use and not for texts."""


def sign_of(id: int) -> str:
    """Return the sign of a special token."""
    return chr(0xD800 + (id >> 10)) + chr(0xDC00 + (id & 1023))


def without_signs(text: str) -> str:
    """Return a text without its special tokens."""
    return SIGN.sub("", text)


def spelled_signs(text: str, tokenizer: Tokenizer) -> str:
    """Return a text with its special tokens spelled out."""
    return SIGN.sub(lambda match: _spelled(match, tokenizer), text)


def signed_mark(text: str, tokenizer: Tokenizer) -> str:
    """Return a mark of the template, such as "<think>", with a sign for each special token in it."""
    pattern = tokenizer.special_pattern
    if pattern is None:
        return text
    return pattern.sub(lambda match: sign_of(tokenizer.token_id(match[0]) or 0), text)


class SignedStream:
    """Makes text of ids that arrive one by one; whole characters and signs only."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream_decoder(skip_specials=False)

    def push(self, id: int) -> str:
        """Take an id. -> the text that is certain now."""
        text = self._decoder.push(id)
        if id not in self._tokenizer.special_ids:
            return text
        return text.removesuffix(self._tokenizer.token_text(id)) + sign_of(id)

    def finish(self) -> str:
        """Return what is left at the end."""
        return self._decoder.finish()


def signed_text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of a sampled turn without the stop id at its end."""
    tokens = tokens[:-1] if len(tokens) and tokens[-1] in tokenizer.eos_ids else tokens
    if tokenizer.special_ids.isdisjoint(tokens):
        return tokenizer.decode(tokens, skip_specials=False)
    stream = SignedStream(tokenizer)
    return "".join([*map(stream.push, tokens), stream.finish()])


@dataclass(frozen=True)
class Guarded:
    """A text in which special tokens are spelled out, and what only looks like one is spelled otherwise.

    guard  the character inside each that only looks like one; "": there is none
    """

    text: str
    guard: str

    def plain(self, value: Any) -> Any:
        """Return a part of the text, or JSON that was read from it, as the model wrote it."""
        if not self.guard:
            return value
        if isinstance(value, str):
            return value.replace(self.guard, "")
        if isinstance(value, dict):
            return {self.plain(key): self.plain(each) for key, each in value.items()}
        return [self.plain(each) for each in value] if isinstance(value, list) else value


def guarded(text: str, tokenizer: Tokenizer) -> Guarded:
    """Spell out the signs of a text, for code that looks for marks by their text."""
    pattern = tokenizer.special_pattern
    if pattern is None or not pattern.search(text):  # no sign matches: special tokens are no surrogates
        return Guarded(spelled_signs(text, tokenizer), "")
    guard = next((each for each in GUARDS if each not in text), GUARDS[0])
    broken: Callable[[re.Match[str]], str] = lambda match: match[0][0] + guard + match[0][1:]  # noqa: E731
    return Guarded(spelled_signs(pattern.sub(broken, text), tokenizer), guard)


def _spelled(match: re.Match[str], tokenizer: Tokenizer) -> str:
    high, low = map(ord, match[0])
    return tokenizer.token_text((high - 0xD800) << 10 | (low - 0xDC00))
