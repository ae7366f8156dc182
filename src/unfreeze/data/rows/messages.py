"""Check the turns and tools of a conversation and normalise them.

A message keeps all fields that are not null. Reasoning becomes reasoning_content, and tool calls become
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
"""Role names of other formats -> ours."""
FLAGS = ("train", "training", "loss")
"""Fields that say if a turn carries loss, in our rows, axolotl's and ms-swift's."""
DETAILS = ("train_detail", "training_detail")
"""axolotl's fields for character spans that carry loss."""
WITHOUT_ROWS = "remove these rows, or --data.on-bad-row skip; "
"""The way around rows that show more than text."""
MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def read_messages(messages: Sequence[Mapping[str, object]]) -> list[Message]:
    """Check and normalise messages given in Python like those of rows; their content may be empty.

    Raises DataError naming the field.
    """
    try:
        return [
            message_of(dict(message), 0, f"messages[{i}]", empty=True) for i, message in enumerate(messages)
        ]
    except DataError as error:
        message, way = error.message.removeprefix("row 0: "), error.next.removeprefix(WITHOUT_ROWS)
        raise DataError(message, next=way) from None


def carries_loss(item: object, row: int, where: str) -> bool:
    """Return a turn's loss flag: "weight" (0 or 1, as in OpenAI's files) or one of FLAGS (true or false)."""
    message = object_of(item, row, where)
    if len(message) == 2:  # role and content only, as in most messages
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
                f"row {row}: field {where}.{name} marks parts of a turn, but loss applies to whole turns",
                next='remove it, or split the turn and set "train": true or false on each part',
            )
    return weight != 0 and all(message.get(name) is not False for name in FLAGS)


def message_of(item: object, row: int, where: str, *, empty: bool = False) -> Message:
    """Check a message and drop its null fields, which tables write for every row.

    empty: allow empty content.
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
    if role == "function":  # OpenAI's old name for a tool's result, and function_call for its call
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
    """Return the error, with a command that renames the roles if they come from another format."""
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
    """Return True for a valid message of only role and text, the common case that needs no further checks."""
    if not is_object(item) or len(item) != 2:
        return False
    content = item.get("content")
    if item.get("role") not in ROLES or type(content) is not str or not content.strip():
        return False
    return not half_surrogate(content)


def _one_reasoning(message: Message, row: int, where: str) -> Message:
    """Store a turn's reasoning as reasoning_content, whichever name the row uses."""
    names = [name for name in REASONING_NAMES if name in message]
    texts = {name: text_of(message.pop(name), row, f"{where}.{name}", empty=True) for name in names}
    distinct = {text for text in texts.values() if text.strip()}
    if len(distinct) > 1:
        raise DataError(
            f"row {row}: fields {' and '.join(f'{where}.{name}' for name in names)} hold different reasoning",
            next="keep one of them",
        )
    return {**message, "reasoning_content": distinct.pop()} if distinct else message


def tool_call_of(value: object, row: int, where: str) -> Tool:
    """Return {"id"?, "type", "function": {"name", "arguments": {…}}}.

    The flat form {"name", "arguments"} and arguments written as JSON text are accepted too.
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
    """Return a call's arguments as an object.

    OpenAI's files store them as JSON text, which a template that prints JSON would quote a second time.
    """
    if isinstance(value, str):
        value = json_of(value, row, where) if value.strip() else {}
    return object_of({} if value is None else value, row, where)


def _content(value: object, row: int, where: str, *, empty: bool) -> object:
    """Check content: a text, or the list form [{"type": "text", "text": …}].

    Other types of parts are refused: a model that sees is trained on text alone (docs/why/images.md).
    """
    if not is_list(value):
        return text_of(value, row, where, empty=empty)
    for i, item in enumerate(list_of(value, row, where, empty=empty)):
        part = object_of(item, row, f"{where}[{i}]")
        if part.get("type", "text") != "text":
            raise DataError(
                f"row {row}: field {where}[{i}].type is {part['type']!r}; only text is trained on",
                next=f"{WITHOUT_ROWS}if the text makes sense alone, remove the part",
            )
        text_of(part.get("text"), row, f"{where}[{i}].text", empty=empty)
    return value


def tools_of(fields: Mapping[str, object], row: int) -> list[Tool] | None:
    """Return `tools` as a list of JSON schemas; it may be a list or the same list written as JSON text.

    OpenAI's old name for it is `functions`.
    """
    tools = fields.get("tools") or fields.get("functions")
    if isinstance(tools, str) and tools.strip():
        tools = json_of(tools, row, "tools")
    if not tools:
        return None
    return [_tool(tool, row, f"tools[{i}]") for i, tool in enumerate(list_of(tools, row, "tools"))]


def _tool(value: object, row: int, where: str) -> Tool:
    """Return a tool's schema in the form of OpenAI and transformers.

    ShareGPT files often leave out the object around the function.
    """
    tool = object_of(value, row, where)
    if tool.get("function") is not None:
        object_of(tool["function"], row, f"{where}.function")
        return tool
    return {"type": "function", "function": tool} if "name" in tool else tool
