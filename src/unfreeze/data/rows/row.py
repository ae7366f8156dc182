"""The checked content of a data file's row: a conversation or one text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Build = Callable[[dict[str, Any], int, Mapping[str, str]], Any]
"""(JSON object, row number, --columns as field -> column) -> the row."""

Message = dict[str, Any]
"""One turn: role, content, and the fields messages.py accepts (reasoning_content, tool_calls, name, …)."""

Tool = dict[str, Any]
"""A tool's JSON schema, or a tool call."""

JsonObject = Mapping[str, Any]
"""Read-only view of a message, tool or call."""

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which rows store a turn's reasoning and templates read it (gpt-oss: thinking). A Conversation
stores it as reasoning_content."""


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template; loss is on the assistant's turns.

    `row` is the line in the file, counted from 1.

        context   indices of assistant turns without loss: those of a prompt, and those with "weight": 0 or
                  "train": false
        columns   of a row that is asked: its whole JSON object, for graders
    """

    messages: list[Message]
    tools: list[Tool] | None = None
    row: int = 0
    shape: str = "messages"
    context: frozenset[int] = frozenset()
    columns: JsonObject = field(default_factory=dict[str, Any], compare=False, repr=False)

    @property
    def taught(self) -> list[int]:
        """Return the indices of the turns that carry loss."""
        return [
            i
            for i, message in enumerate(self.messages)
            if message["role"] == "assistant" and i not in self.context
        ]


@dataclass(frozen=True)
class Text:
    """One document; loss is on every token."""

    text: str
    row: int = 0
    shape: str = "text"


@dataclass(frozen=True)
class Judged:
    """Two answers to one prompt, one of them preferred; or one labelled answer, with None for the other.

    Both start with the same turns, none of which carries loss.
    """

    chosen: Conversation | Text | None
    rejected: Conversation | Text | None
    row: int = 0
    shape: str = "chosen/rejected"

    @property
    def answers(self) -> list[Conversation | Text]:
        """Return the answers that are present, the chosen one first."""
        return [answer for answer in (self.chosen, self.rejected) if answer is not None]


Row = Conversation | Text

Answers = Literal["taught", "pairs", "labels", "asked"]
"""How rows are used: "taught" trains on one answer; "pairs" compares two answers; "labels" uses labelled
answers (also those of pairs); "asked" takes a prompt whose answer will be generated. For pairs and labels a
row is a Judged."""


_SORTED = json.JSONEncoder(sort_keys=True, ensure_ascii=False)


def content_digest(row: Row | Judged) -> bytes:
    """Return blake2b-128 of the content (messages and tools, or text), whatever shape it was written in."""
    if isinstance(row, Judged):
        sides = [b"" if answer is None else content_digest(answer) for answer in (row.chosen, row.rejected)]
        return hashlib.blake2b(b"judged" + b"|".join(sides), digest_size=16).digest()
    content = row.text if isinstance(row, Text) else _SORTED.encode([row.messages, row.tools])
    kind = b"text" if isinstance(row, Text) else b"chat"
    return hashlib.blake2b(kind + content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def columns_digest(row: Conversation) -> bytes:
    """Return blake2b-128 of all columns of a row that is asked, in any order."""
    content = _SORTED.encode(row.columns)
    return hashlib.blake2b(b"columns" + content.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True)
class BadRow:
    """A row that could not be used, and the reason; `file` is its name if there are several files."""

    row: int
    reason: str
    file: str = ""


class RowPlace(NamedTuple):
    """A row's number and the position of its bytes in the file."""

    row: int
    offset: int
    size: int
