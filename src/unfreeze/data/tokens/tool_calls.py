"""Tool calls in the text of an answer, in the form that the chat template writes them.

hermes   <tool_call>{"name": …, "arguments": {…}}</tool_call>           Qwen2.5, Qwen3, Hermes
kimi     <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
Qwen3-Coder's and GLM's forms, with a tag for each argument, and those without tags are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.data.rows.fields import half_surrogate
from unfreeze.data.rows.row import Tool
from unfreeze.untrusted.json_object import is_list, is_object, parse_object

MAX_CALLS = 16
"""Calls of one turn that are answered; more are a fault."""
MAX_DEPTH = 64
"""Nesting of arguments. JSON is read deeper than a chat template can write it."""


@dataclass(frozen=True)
class Spoken:
    """An answer, taken apart.

    content  the text without its calls
    calls    {"id", "type", "function": {"name", "arguments"}}, as messages have them
    fault    why a call could not be read; "" if all could. The model is told
    """

    content: str
    calls: list[Tool] = field(default_factory=list[Tool])
    fault: str = ""


Read = Callable[[str, int], Spoken]
"""(text, calls before it in the conversation) -> its parts."""

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_KIMI = re.compile(
    r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)(<\|tool_call_end\|>|\Z)", re.DOTALL
)
_KIMI_SECTION = re.compile(r"<\|tool_calls_section_begin\|>.*", re.DOTALL)


def reads_calls(source: str) -> Read:
    """Return the reader of the calls that a chat template writes. Raises ConfigError if it is not known."""
    if "<|tool_call_argument_begin|>" in source:
        return kimi
    if "<tool_call>" in source and "<function=" not in source and "<arg_key>" not in source:
        return hermes
    if "tools" not in source:
        raise ConfigError(
            "the chat template has no place for tools, so this model cannot use them",
            next="a model of the families of Qwen or Kimi, or a chat_template.jinja with tools",
        )
    raise ConfigError(
        "the chat template writes tool calls in a form that is not read; read are those of Qwen and Kimi",
        next="a model of these families, or a chat_template.jinja that writes <tool_call>{…}</tool_call>",
    )


def hermes(text: str, before: int = 0) -> Spoken:
    """Read JSON objects between tags; `arguments` may be JSON text."""
    calls: list[Tool] = []
    for match in _HERMES.finditer(text):
        if not match[2]:
            return Spoken(_HERMES.sub("", text).strip(), calls, "the tool call is not closed by </tool_call>")
        try:
            call = parse_object(match[1].strip().encode("utf-8", "replace"), "the tool call", UserError)
        except UserError as error:
            return Spoken(_HERMES.sub("", text).strip(), calls, error.message)
        calls.append(_call(call.get("name"), call.get("arguments"), before + len(calls)))
    return _whole(_HERMES.sub("", text).strip(), calls)


def kimi(text: str, before: int = 0) -> Spoken:
    """Read Kimi's calls, each with an id of its own."""
    calls: list[Tool] = []
    content = _KIMI_SECTION.sub("", text)
    for match in _KIMI.finditer(text):
        if not match[3]:
            return Spoken(content, calls, "the tool call is not closed by <|tool_call_end|>")
        id = match[1].strip()
        name = id.removeprefix("functions.").rpartition(":")[0] or id
        calls.append({**_call(name, match[2].strip(), before + len(calls)), "id": id})
    if content != text and not calls:
        return Spoken(content, [], "the section of tool calls has no call")
    return _whole(content, calls)


def _call(name: object, arguments: object, number: int) -> Tool:
    if isinstance(arguments, str):
        try:
            arguments = parse_object(arguments.encode("utf-8", "replace"), "arguments", UserError)
        except UserError as error:
            arguments = error
    function: dict[str, Any] = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": f"functions.{name}:{number}", "type": "function", "function": function}


def _whole(content: str, calls: list[Tool]) -> Spoken:
    """Check the calls: a name and an object of arguments each, and no more than MAX_CALLS."""
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not isinstance(name, str) or not name:
            return Spoken(content, [], "the tool call has no name")
        if fault := _unwritable([name, arguments]):
            return Spoken(content, [], f"the tool call {fault}")
        if isinstance(arguments, UserError):
            return Spoken(content, [], f"{name}: {arguments.message}")
        if not is_object(arguments):
            return Spoken(content, [], f"{name}: arguments is a {type(arguments).__name__}, not an object")
    if len(calls) > MAX_CALLS:
        return Spoken(content, [], f"{len(calls)} tool calls at once; at most {MAX_CALLS} are answered")
    return Spoken(content, calls)


def _unwritable(value: object, depth: int = 0) -> str:
    """Return the reason why a chat template cannot write a JSON value; "" if it can."""
    if isinstance(value, str):
        return "has half a surrogate pair" if half_surrogate(value) else ""
    if depth > MAX_DEPTH:
        return f"is nested deeper than {MAX_DEPTH}"
    inner = [*value, *value.values()] if is_object(value) else value if is_list(value) else []
    return next(filter(None, (_unwritable(each, depth + 1) for each in inner)), "")
