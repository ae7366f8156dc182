"""A conversation of the same shape in other words.

What a template does with a shape (which form it takes, whom it leaves out) is found out once, on this.
It is a function of the shape alone, so what becomes of a row hangs on no other row.

Kept      roles, which fields there are and in which order, what is empty or null, think marks in a content,
          the names of arguments and how they are nested, true and false
Replaced  texts by words that name their place, numbers by one of their type, names and ids by their order,
          tools by one plain tool for each name that is called
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, cast

from unfreeze.data.rows.row import REASONING_NAMES, Conversation, JsonObject, Message, Tool
from unfreeze.untrusted.json_object import is_list

RowShape = tuple[Any, ...]

_THINK = re.compile(r"(\s*</?think>\s*)")
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "description": "where"}}}


def shape_of(row: Conversation) -> RowShape:
    """What rows with one stand-in have in common; plain values."""
    plain = [_plain(message) for message in row.messages]
    messages = json.dumps(stand_in(row).messages, default=repr) if None in plain else tuple(plain)
    return messages, None if row.tools is None else bool(row.tools), tuple(sorted(row.context))


def _plain(message: JsonObject) -> RowShape | None:
    """The shape of a role and a text and nothing else, as most messages are."""
    content = message.get("content")
    if len(message) != 2 or type(content) is not str or "think>" in content:
        return None
    return message["role"], next(iter(message)), None if content and not content.isspace() else content


def stand_in(row: Conversation) -> Conversation:
    """The stand-in of a row's shape."""
    writing = _Writing()
    messages = [writing.message(message) for message in row.messages]
    tools = None if row.tools is None else [_tool(name) for name in writing.called or ["name_0"] if row.tools]
    return Conversation(messages, tools, 0, row.shape, row.context)


def _tool(name: str) -> Tool:
    function = {"name": name, "description": "Looks around.", "parameters": _PARAMETERS}
    return {"type": "function", "function": function}


class _Writing:
    """Of one conversation.

    called: the names of its calls
    """

    def __init__(self) -> None:
        self.called: list[str] = []
        self._places = count(1)
        self._names: dict[str, str] = {}
        self._ids: dict[str, str] = {}

    def message(self, message: JsonObject) -> Message:
        made: Message = {}
        for field, value in message.items():
            if field in ("content", *REASONING_NAMES):
                parts = "".join(part["text"] for part in value) if is_list(value) else value
                made[field] = self._text(parts) if isinstance(parts, str) else value
            elif field == "tool_calls":
                made[field] = [self._call(call) for call in value]
            elif field in ("name", "tool_call_id"):
                made[field] = self._numbered(value, self._names if field == "name" else self._ids, field)
            else:
                made[field] = value
        return made

    def _call(self, call: JsonObject) -> Tool:
        function = call["function"]
        name = self._numbered(function["name"], self._names, "name")
        self.called += [name] if name not in self.called else []
        made = {
            **call,
            "function": {**function, "name": name, "arguments": self._value(function["arguments"])},
        }
        return made | ({"id": self._numbered(call["id"], self._ids, "tool_call_id")} if "id" in call else {})

    @staticmethod
    def _numbered(value: object, known: dict[str, str], what: str) -> str:
        return known.setdefault(repr(value), f"{what}_{len(known)}")

    def _text(self, text: str) -> str:
        """Words for each stretch between think marks."""
        pieces = _THINK.split(text) if "think>" in text else [text]
        return "".join(
            piece
            if place % 2 or not piece or piece.isspace()
            else f"Words {next(self._places):03d} stand here."
            for place, piece in enumerate(pieces)
        )

    def _value(self, value: object) -> object:
        if isinstance(value, Mapping):
            fields = cast("Mapping[str, object]", value)
            return {name: self._value(item) for name, item in fields.items()}
        if isinstance(value, list | tuple):
            return [self._value(item) for item in cast("Sequence[object]", value)]
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, bool) or value is None:
            return value
        return 7.0 if isinstance(value, float) else 7
