"""Convert a row's messages to the form a chat template expects.

Reasoning under the right field name, tool calls with the release's ids, plain text. `as_template_reads`
applies what is known for a release. `FORMS` are variants in which templates differ; turns.py finds the right
one by trying them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unfreeze.core.errors import DataError
from unfreeze.data.rows.row import REASONING_NAMES, JsonObject, Message, Tool
from unfreeze.data.tokens.releases import Release, ThinkMarks
from unfreeze.untrusted.json_object import is_list

Reasoning = Literal["auto", "inline", "drop"]
"""auto: train on reasoning as the template or the release's marks write it, else refuse; inline: write it as
`<think>…</think>` before the answer; drop: leave it out."""

INLINE_MARKS = ThinkMarks("<think>\n", "\n</think>\n\n")
_INLINE = re.compile(r"\s*<think>(?P<reasoning>.*?)</think>(?P<content>.*)", re.DOTALL)


@dataclass(frozen=True)
class Prepared:
    """The template's input, and notes about it (each is shown once, with the number of rows).

    spelled   turn index -> the think marks that the row wrote into its content, or would with
              --data.reasoning inline
    written   the messages with those blocks left in their content: the history for a template that has no
              place for reasoning
    """

    messages: list[Message]
    tools: list[Tool] | None
    notes: tuple[str, ...] = ()
    spelled: Mapping[int, ThinkMarks] = field(default_factory=dict[int, ThinkMarks])
    written: list[Message] | None = None


def as_template_reads(
    messages: Sequence[JsonObject],
    tools: Sequence[JsonObject] | None,
    template: str,
    release: Release,
    reasoning: Reasoning = "auto",
) -> Prepared:
    """Convert a row's messages to messages as this template (its source text) reads them.

    The row is not modified. Raises DataError for a tool result that belongs to no call.
    """
    # where this template reads reasoning; this decides if a row's <think> block is moved out of its content
    read = _read(template)
    # the template has no place for reasoning, and may remove it from content
    cuts = not read and release.think is None and "think>" in template
    splits = cuts or (
        reasoning != "inline" and (bool(read) or release.think is not None or "</think>" in template)
    )
    joins = reasoning == "inline" and not cuts
    fields = read or ("reasoning_content",)
    # each turn twice: as the template reads it, and as the row wrote it
    prepared: list[Message] = []
    written: list[Message] = []
    spelled: dict[int, ThinkMarks] = {}
    for place, message in enumerate(messages):
        turn: Message = {**message, "content": _text(message.get("content"))}
        if turn["role"] == "assistant":
            written.append(_with_reasoning(dict(turn), fields, reasoning == "inline", reasoning))
            if reasoning == "inline" and turn.get("reasoning_content"):
                spelled[place] = INLINE_MARKS
            elif splits and not turn.get("reasoning_content") and (taken := _taken_apart(turn)):
                turn, spelled[place] = taken
            turn = _with_reasoning(turn, fields, joins, reasoning)
        else:
            written.append(turn)
        prepared.append(turn)
    notes: list[str] = []
    # ids in the release's own form, because the model will write them so
    left_in = cuts and spelled and reasoning != "drop"
    if release.call_id is not None and _rewrite_ids(prepared, release.call_id):
        _rewrite_ids(written, release.call_id)
        notes.append(
            f"tool-call ids rewritten to {release.name}'s form {release.id_form}, in the call and in its"
            " return"
        )
    schemas = None if tools is None else [dict(tool) for tool in tools]
    return Prepared(prepared, schemas, tuple(notes), spelled, written if left_in else None)


@functools.lru_cache(maxsize=64)
def _read(template: str) -> tuple[str, ...]:
    """Return the field names under which a template's source reads reasoning."""
    return tuple(name for name in REASONING_NAMES if re.search(rf"[.'\"]{name}\b", template))


def _text(content: object) -> object:
    """Join content given as a list of text parts.

    A template that only handles strings would print the list as Python does.
    """
    return "".join(part["text"] for part in content) if is_list(content) else content


def _taken_apart(message: Message) -> tuple[Message, ThinkMarks] | None:
    """Move a `<think>` block at the start of a turn's content to the reasoning field.

    Also return its marks as they were written.
    """
    match = _INLINE.fullmatch(message["content"]) if isinstance(message["content"], str) else None
    if not match:
        return None
    inside, behind = match["reasoning"], match["content"]
    thought, content = inside.strip("\n"), behind.lstrip("\n")
    before = inside[: len(inside) - len(inside.lstrip("\n"))]
    after = inside[len(inside.rstrip("\n")) :]
    marks = ThinkMarks(f"<think>{before}", f"{after}</think>{behind[: len(behind) - len(content)]}")
    return {**message, "content": content, "reasoning_content": thought}, marks


def _with_reasoning(message: Message, fields: Sequence[str], joins: bool, mode: Reasoning) -> Message:
    """Put an assistant turn's reasoning under the names in `fields`, or into its content."""
    content, thought = message["content"], message.pop("reasoning_content", None)
    if joins and thought:
        return {**message, "content": INLINE_MARKS.opening + thought + INLINE_MARKS.closing + (content or "")}
    if mode == "drop" or not thought:
        return {**message, "content": content}
    return {**message, "content": content, **dict.fromkeys(fields, thought)}


def reasoning_of(message: JsonObject) -> str:
    """Return the reasoning of a prepared turn; "" if none."""
    return next((message[name] for name in REASONING_NAMES if message.get(name)), "")


def _rewrite_ids(messages: list[Message], form: Callable[[str, int], str]) -> bool:
    """Give every call the id that the model itself would write, and its result the same one.

    Return True if any id changed.
    """
    changed, index = False, 0
    names: dict[str, str] = {}  # the row's id -> the new one
    waiting: list[str] = []  # new ids of calls whose result has not come yet
    for place, message in enumerate(messages):
        # calls: assign a new id, stored under the row's id
        if message.get("tool_calls"):
            calls: list[Tool] = []
            waiting = []
            for call in message["tool_calls"]:
                new = form(call["function"]["name"], index)
                index += 1
                old = call.get("id")
                names |= {old: new} if isinstance(old, str) else {}
                waiting.append(new)
                changed |= old != new
                calls.append({**call, "id": new})
            messages[place] = {**message, "tool_calls": calls}
        # a result: the id of its call by name, else of the first call still waiting
        elif message["role"] == "tool":
            old = message.get("tool_call_id")
            first = waiting[0] if waiting else None
            new = names.get(old, first) if isinstance(old, str) else first
            if new is None:
                raise DataError(
                    f"messages[{place}] (tool) returns to no call: tool_call_id is {old!r}",
                    next="give it the id of a call before it",
                )
            waiting = [id for id in waiting if id != new]
            changed |= old != new
            messages[place] = {**message, "tool_call_id": new}
    return changed


def _as_it_is(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def _arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write tool-call arguments as JSON text: DeepSeek's templates concatenate them with strings."""

    def call(tool_call: JsonObject) -> Tool:
        arguments = json.dumps(tool_call["function"]["arguments"], ensure_ascii=False)
        return {**tool_call, "function": {**tool_call["function"], "arguments": arguments}}

    return [
        {**m, "tool_calls": [call(item) for item in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def no_null_content(messages: Sequence[Message]) -> list[Message]:
    """Set content to "" for a turn that only calls tools: gpt-oss' template searches it."""
    return [{**message, "content": ""} if message.get("content") is None else message for message in messages]


def _without_content(messages: Sequence[Message]) -> list[Message]:
    """Remove content from a turn that only calls tools."""
    return [{k: v for k, v in message.items() if k != "content" or v is not None} for message in messages]


def _content_as_parts(messages: Sequence[Message]) -> list[Message]:
    """Write content as [{"type": "text", "text": …}], the only form some multimodal templates accept."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
        for m in messages
    ]


Form = Callable[[Sequence[Message]], list[Message]]

FORMS: tuple[Form, ...] = (
    _as_it_is,
    _arguments_as_text,
    no_null_content,
    lambda messages: _arguments_as_text(no_null_content(messages)),
    _without_content,
    _content_as_parts,
)
"""Tried in this order until one renders and trains on every word. Objects come before text, because a
template that prints arguments as JSON would quote text a second time."""
