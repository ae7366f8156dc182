"""The turns of a conversation and its tools, checked and brought into one form.

A message keeps its fields but for those that are null. Reasoning is reasoning_content, tool calls are
{"type": "function", "function": {"name", "arguments": {…}}}, whichever form the row uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from unfreeze.core.errors import DataError, near_word, nearest
from unfreeze.data.rows.fields import half_surrogate, json_of, json_type, list_of, object_of, text_of
from unfreeze.data.rows.row import REASONING_NAMES, Message, Tool
from unfreeze.untrusted.json_object import is_list, is_object

ROLES = ("system", "user", "assistant", "tool")
ELSEWHERE = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Roles of other forms of rows -> ours."""
FLAGS = ("train", "training", "loss")
"""Whether a turn carries loss, as our rows, axolotl's and ms-swift's name it."""
DETAILS = ("train_detail", "training_detail")
"""axolotl's stretches of characters that carry loss."""
MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def read_messages(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """Messages given in Python, checked and brought into the form that rows have; they may be empty.

    Raises DataError naming the field.
    """
    try:
        return [
            message_of(dict(message), 0, f"messages[{i}]", empty=True) for i, message in enumerate(messages)
        ]
    except DataError as error:
        raise DataError(error.message.removeprefix("row 0: "), next=error.next) from None


def carries_loss(item: object, row: int, where: str) -> bool:
    """A turn's "weight" (0 or 1, as OpenAI's files have it) or one of FLAGS (true or false)."""
    message = object_of(item, row, where)
    if len(message) == 2:  # who and what, as most are
        return True
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise DataError(f"row {row}: field {where}.weight is {weight!r}; a turn's weight is 0 or 1")
    for name in FLAGS:
        if not isinstance(flag := message.get(name), bool | None):
            raise DataError(f"row {row}: field {where}.{name} is {json_type(flag)}, expected true or false")
    for name in DETAILS:
        if message.get(name):
            raise DataError(
                f"row {row}: field {where}.{name} marks parts of a turn; loss is on whole turns only",
                next='leave it out, or split the turn and give its parts "train": true or false',
            )
    return weight != 0 and all(message.get(name) is not False for name in FLAGS)


def message_of(item: object, row: int, where: str, *, empty: bool = False) -> Message:
    """Check a message and drop its null fields, which tables write for every row.

    `empty`: its content may be empty.
    """
    if _is_plain(item):
        return dict(item)
    message = {name: value for name, value in object_of(item, row, where).items() if value is not None}
    if "role" not in message and "from" in message and where.startswith("messages["):
        raise DataError(
            f"row {row}: field {where} has from and value, not role and content",
            next="--columns conversations=messages",
        )
    role = text_of(message.get("role"), row, f"{where}.role")
    if role == "function":  # OpenAI's first form of a tool's return, and of its call
        role = message["role"] = "tool"
    if "function_call" in message:
        if message.get("tool_calls"):
            raise DataError(
                f"row {row}: field {where} has function_call and tool_calls", next="keep one of them"
            )
        message["tool_calls"] = [message.pop("function_call")]
    if role not in ROLES:
        raise _unknown_role(role, row, where)
    message = {name: value for name, value in message.items() if name not in ("weight", *FLAGS, *DETAILS)}
    for name in message:
        if name not in (*MESSAGE_FIELDS, *REASONING_NAMES) and nearest(name, MESSAGE_FIELDS):
            raise DataError(f"row {row}: field {where}.{name} is not known{nearest(name, MESSAGE_FIELDS)}")
    calls = [
        tool_call_of(call, row, f"{where}.tool_calls[{i}]")
        for i, call in enumerate(
            list_of(message.pop("tool_calls", []), row, f"{where}.tool_calls", empty=True)
        )
    ]
    message = {**_one_reasoning(message, row, where), **({"tool_calls": calls} if calls else {})}
    if "content" not in message and calls:
        # templates test `content is none` for a turn that only calls tools
        return {**message, "content": None}
    may_be_empty = empty or role in ("system", "tool") or bool(calls)
    return {
        **message,
        "content": _content(message.get("content"), row, f"{where}.content", empty=may_be_empty),
    }


def _unknown_role(role: str, row: int, where: str) -> DataError:
    """With the line that renames the roles of another form, where it is one of them."""
    ours, next = ELSEWHERE.get(role) or near_word(role, ROLES), ""
    if role in ELSEWHERE:
        others = ("human", "gpt") if role in ("human", "gpt") else (role,)
        swaps = (f's/("role": *)"{name}"/\\1"{ELSEWHERE[name]}"/g' for name in others)
        next = f"rename them: sed -E '{'; '.join(swaps)}' OLD.jsonl > NEW.jsonl"
    meant = f". Did you mean {ours!r}?" if ours else ""
    return DataError(
        f"row {row}: field {where}: unknown role {role!r} (known: {', '.join(ROLES)}){meant}", next=next
    )


def _is_plain(item: object) -> TypeGuard[dict[str, str]]:
    """Whether it is a role and a text and nothing else, as most are: nothing is left to check."""
    if not is_object(item) or len(item) != 2:
        return False
    content = item.get("content")
    if item.get("role") not in ROLES or type(content) is not str or not content.strip():
        return False
    return not half_surrogate(content)


def _one_reasoning(message: Message, row: int, where: str) -> Message:
    """A turn's reasoning as reasoning_content, whichever of its names the row uses."""
    given = [name for name in REASONING_NAMES if name in message]
    texts = {name: text_of(message.pop(name), row, f"{where}.{name}", empty=True) for name in given}
    said = {text for text in texts.values() if text.strip()}
    if len(said) > 1:
        raise DataError(
            f"row {row}: fields {' and '.join(f'{where}.{name}' for name in given)} hold different reasoning",
            next="keep one of them",
        )
    return {**message, "reasoning_content": said.pop()} if said else message


def tool_call_of(value: object, row: int, where: str) -> Tool:
    """{"id"?, "type", "function": {"name", "arguments": {…}}}.

    The flat form {"name", "arguments"} and arguments written as JSON text are taken too.
    """
    call = object_of(value, row, where)
    inside = "function" in call
    function = object_of(call["function"], row, f"{where}.function") if inside else call
    at = f"{where}.function" if inside else where
    name = text_of(function.get("name"), row, f"{at}.name")
    known = {
        key: item
        for key, item in call.items()
        if key not in ("function", "name", "arguments") and item is not None
    }
    return {
        "type": "function",
        **known,
        "function": {
            "name": name,
            "arguments": _arguments(function.get("arguments"), row, f"{at}.arguments"),
        },
    }


def _arguments(value: object, row: int, where: str) -> Tool:
    """A call's arguments as an object.

    OpenAI's files hold them as JSON text; a template that spells them out would put that in quotes again.
    """
    if isinstance(value, str):
        value = json_of(value, row, where) if value.strip() else {}
    return object_of({} if value is None else value, row, where)


def _content(value: object, row: int, where: str, *, empty: bool) -> object:
    """Text, or the list form [{"type": "text", "text": …}].

    Other kinds of part are refused: there is no model here that sees them.
    """
    if not is_list(value):
        return text_of(value, row, where, empty=empty)
    for i, item in enumerate(list_of(value, row, where, empty=empty)):
        part = object_of(item, row, f"{where}[{i}]")
        if part.get("type", "text") != "text":
            raise DataError(
                f"row {row}: field {where}[{i}].type is {part['type']!r}; only text is trained on"
            )
        text_of(part.get("text"), row, f"{where}[{i}].text", empty=empty)
    return value


def tools_of(fields: Mapping[str, object], row: int) -> list[Tool] | None:
    """`tools` as a list of JSON schemas, or as the same list written into a string.

    OpenAI's first form of it is `functions`.
    """
    tools = fields.get("tools") or fields.get("functions")
    if isinstance(tools, str) and tools.strip():
        tools = json_of(tools, row, "tools")
    if not tools:
        return None
    return [_tool(tool, row, f"tools[{i}]") for i, tool in enumerate(list_of(tools, row, "tools"))]


def _tool(value: object, row: int, where: str) -> Tool:
    """A tool's schema as OpenAI and transformers write it.

    ShareGPT files often leave out what is around the function.
    """
    tool = object_of(value, row, where)
    if tool.get("function") is not None:
        object_of(tool["function"], row, f"{where}.function")
        return tool
    return {"type": "function", "function": tool} if "name" in tool else tool
