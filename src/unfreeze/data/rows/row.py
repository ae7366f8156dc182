"""What a row of a data file is, checked: a conversation, or one text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Build = Callable[[dict[str, Any], int, Mapping[str, str]], Any]
"""One JSON object, its row and --columns (field -> column) -> the row it is."""

Message = dict[str, Any]
"""One turn: role, content, and what messages.py lets through (reasoning_content, tool_calls, name, …)."""

Tool = dict[str, Any]
"""A tool's JSON schema, or a call of one."""

JsonObject = Mapping[str, Any]
"""A message, a tool or a call, to read."""

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which rows hold a turn's reasoning and templates read it (gpt-oss: thinking). In a Conversation
it is reasoning_content."""


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template; loss on the assistant's turns.

    `row` is the line in the file, counted from 1.

    context   places of assistant's turns that carry no loss: those of a prompt, and those with "weight": 0 or
              "train": false
    """

    messages: list[Message]
    tools: list[Tool] | None = None
    row: int = 0
    shape: str = "messages"
    context: frozenset[int] = frozenset()

    @property
    def taught(self) -> list[int]:
        """Places of the turns that carry loss."""
        return [
            i
            for i, message in enumerate(self.messages)
            if message["role"] == "assistant" and i not in self.context
        ]


@dataclass(frozen=True)
class Text:
    """One document; loss on every token."""

    text: str
    row: int = 0
    shape: str = "text"


@dataclass(frozen=True)
class Judged:
    """Two answers to one prompt, of which one is preferred; or one with a label, None in place of the other.

    Both begin with the same turns, of which none carries loss.
    """

    chosen: Conversation | Text | None
    rejected: Conversation | Text | None
    row: int = 0
    shape: str = "chosen/rejected"

    @property
    def answers(self) -> list[Conversation | Text]:
        """Those that are there, the chosen one first."""
        return [answer for answer in (self.chosen, self.rejected) if answer is not None]


Row = Conversation | Text

Answers = Literal["taught", "pairs", "labels", "asked"]
"""What rows are read for: one answer that is taught; pairs of answers; answers with a label (also those of
pairs); or what is asked, whose answer is still to come. Of pairs and labels a row is a Judged."""


_SORTED = json.JSONEncoder(sort_keys=True, ensure_ascii=False)


def content_digest(row: Row | Judged) -> bytes:
    """blake2b-128 of what the row says (messages and tools, or text), whatever shape it was written in."""
    if isinstance(row, Judged):
        sides = [b"" if answer is None else content_digest(answer) for answer in (row.chosen, row.rejected)]
        return hashlib.blake2b(b"judged" + b"|".join(sides), digest_size=16).digest()
    content = row.text if isinstance(row, Text) else _SORTED.encode([row.messages, row.tools])
    kind = b"text" if isinstance(row, Text) else b"chat"
    return hashlib.blake2b(kind + content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True)
class BadRow:
    """A row that could not be used, and why; `file` is its name where there are several."""

    row: int
    reason: str
    file: str = ""


class RowPlace(NamedTuple):
    """Where a row's bytes lie in its file, and its number."""

    row: int
    offset: int
    size: int
