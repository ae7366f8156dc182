"""The deltas of a streamed chat answer: reasoning and content as they become certain, calls at the end.

Their sum is the whole answer. A call is sent when all of the answer is there, because one that cannot be read
makes all of them text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unfreeze.data.tokens.completions import Completions
from unfreeze.data.tokens.masks import end_texts
from unfreeze.data.tokens.think import USUAL_MARKS, ThinkBlock, written_marks
from unfreeze.data.tokens.tool_calls import Read, kimi
from unfreeze.generate.stops import StopText
from unfreeze.serve.signs import SignedStream, signed_mark, spelled_signs, without_signs

if TYPE_CHECKING:
    from unfreeze.data.rows.row import Message
    from unfreeze.data.tokens.tokenizer import Tokenizer
    from unfreeze.generate.answer import Piece

HERMES_MARKS = ("<tool_call>",)
KIMI_MARKS = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
FRAGMENT = 64  # characters of a call's arguments in one event


@dataclass(frozen=True)
class Shape:
    """Texts that a template puts around the parts of an answer.

    block, opening, closing   of reasoning
    thinks   the template writes reasoning
    calls    what a call begins with; () if calls are not read
    strips   content loses the white space around it where the request has tools
    """

    block: ThinkBlock
    opening: str
    closing: str
    thinks: bool
    calls: tuple[str, ...]
    strips: bool

    def unclosed(self, text: str, thought: str) -> str | None:
        """Return reasoning that has no end; None if the text is something else."""
        begins = text.lstrip().startswith(self.opening)
        if self.closing in text or not (begins or thought == "open"):
            return None
        return text.strip().removeprefix(self.opening).strip()


def shape_of(tokenizer: Tokenizer, read: Read | None) -> Shape:
    """Return the marks of a tokenizer's template. read: of its calls."""
    marks = Completions(tokenizer.chat, end_texts(tokenizer)).marks
    around = marks or USUAL_MARKS
    thinks = written_marks(tokenizer.chat) is not None  # else the release's newer models do, not this one
    calls = () if read is None else KIMI_MARKS if read is kimi else HERMES_MARKS
    return Shape(
        ThinkBlock(around),
        around.opening.strip(),
        around.closing.strip(),
        thinks,
        calls,
        calls == HERMES_MARKS,
    )


class Deltas:
    """Takes the tokens of one answer.

    thought   "open": the prompt ends inside a think block
    tools     calls are read
    live      send reasoning before its end is there
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        shape: Shape,
        thought: str,
        stop: Sequence[str],
        *,
        tools: bool,
        live: bool,
    ):
        self.live, self._tokenizer = live, tokenizer
        self._decoder = SignedStream(tokenizer)
        self._stops = StopText(stop)
        self._opening, self._closing, *calls = (
            signed_mark(mark, tokenizer) for mark in (shape.opening, shape.closing, *shape.calls)
        )
        self._calls = tuple(calls) if tools else ()
        self._strips = shape.strips and tools
        self._longest = max(map(len, self._calls), default=0)
        self._state = "head"
        self._open = thought == "open"
        self._text = ""  # not sent yet
        self.sent = {"reasoning_content": "", "content": ""}

    def push(self, piece: Piece) -> dict[str, str]:
        """Take a token. -> the delta that is certain now; {} if none."""
        if piece.stop_reason == "end":
            return {}
        text, _ = self._stops.push(self._decoder.push(piece.token))
        self._text += text
        delta: dict[str, str] = {}
        while (part := self._step()) is not None:
            name, new = part
            new = spelled_signs(new, self._tokenizer)  # of reasoning: content has none
            if new:
                delta[name] = delta.get(name, "") + new
                self.sent[name] += new
        return delta

    def rest(self, message: Message) -> Iterator[dict[str, Any]]:
        """Yield what is left of the whole message: text, then each call."""
        for name, sent in self.sent.items():
            whole = message.get(name) or ""
            # text behind a call that cannot be read: only white space at its beginning was left out
            left = whole if whole.startswith(sent) else whole.lstrip()
            if left.startswith(sent) and len(left) > len(sent):
                yield {name: left[len(sent) :]}
        for index, call in enumerate(message.get("tool_calls") or ()):
            yield from call_deltas(index, call)

    def _step(self) -> tuple[str, str] | None:
        """Go on by one part of the text. -> (field, text); None if more is needed."""
        if self._state == "head":
            return self._head()
        if self._state == "thought":
            return self._thought()
        return self._content() if self._state == "content" else None

    def _head(self) -> tuple[str, str] | None:
        text, opening = self._text.lstrip(), self._opening
        if len(text) < len(opening) and opening.startswith(text):
            return None
        begins = text.startswith(opening)
        self._state = "thought" if begins or self._open else "content"
        if self._state == "thought":
            self._text = text.removeprefix(opening)
        return "content", ""

    def _thought(self) -> tuple[str, str] | None:
        text = self._text if self.sent["reasoning_content"] else self._text.lstrip()
        thought, closed, rest = text.partition(self._closing)
        if closed:
            self._state, self._strips, self._text = "content", True, rest
            return "reasoning_content", thought.rstrip()
        held = max(_overlap(text, (self._closing,), len(self._closing)), _space(text))
        if not self.live or len(text) == held:
            return None
        cut = len(text) - held
        cut -= _space(text[:cut])
        self._text = text[cut:]
        return ("reasoning_content", text[:cut]) if cut else None

    def _content(self) -> tuple[str, str] | None:
        text = self._text
        begins = [at for mark in self._calls if (at := text.find(mark)) >= 0]
        if begins:
            self._state, text = "calls", text[: min(begins)]
            text, self._text = without_signs(text), ""
            text = text.rstrip() if self._strips else text
            return "content", text if self.sent["content"] or not self._strips else text.lstrip()
        cut = len(text) - _overlap(text, self._calls, self._longest)
        certain = without_signs(text[:cut])
        certain = certain.lstrip() if self._strips and not self.sent["content"] else certain
        space = _space(certain)
        self._text = certain[len(certain) - space :] + text[cut:]
        certain = certain[: len(certain) - space]
        return ("content", certain) if certain else None


def call_deltas(index: int, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a call in OpenAI's form: its name, then its arguments as JSON text in fragments."""
    function = call["function"]
    head = {"name": function["name"], "arguments": ""}
    yield {"tool_calls": [{"index": index, "id": call.get("id"), "type": "function", "function": head}]}
    text = json.dumps(function["arguments"])
    for at in range(0, len(text), FRAGMENT):
        part = {"arguments": text[at : at + FRAGMENT]}
        yield {"tool_calls": [{"index": index, "function": part}]}


def _overlap(text: str, marks: Sequence[str], longest: int) -> int:
    """Return the length of the longest end of a text that one of the marks may begin with."""
    for begin in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark[0] == text[begin] and mark.startswith(text[begin:]) for mark in marks):
            return len(text) - begin
    return 0


def _space(text: str) -> int:
    """Return the length of the white space at the end."""
    return len(text) - len(text.rstrip())
