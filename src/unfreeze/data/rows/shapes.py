"""The shapes a JSON row may have. A row takes the first whose fields it has; `Row.shape` says which.

messages             messages: [{role, content, reasoning_content?, tool_calls?}, …]: as it stands
conversations        ShareGPT: conversations: [{from, value}, …], system?, tools?: human -> user, gpt ->
                     assistant, function_call and observation -> a tool call and its return
prompt/completion    two texts, or two lists of messages: what is asked, what is taught
question/answer      two texts: a user's turn and the assistant's
instruction/output   alpaca: instruction, input?, output, system?: instruction, blank line, input; output
text                 text: one document, loss on all of it

Shapes may be mixed in one file. Fields that belong to no shape (id, source, …) are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from unfreeze.core.errors import DataError, nearest
from unfreeze.data.rows.fields import MAX_DEPTH, deeper_than, json_of, list_of, object_of, text_of
from unfreeze.data.rows.messages import carries_loss, message_of, tool_call_of, tools_of
from unfreeze.data.rows.row import Conversation, Message, Row, Text, Tool

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function_call": "assistant",
    "observation": "tool",
}

Fields = Mapping[str, object]


def row_from_dict(fields: Fields, row: int = 0) -> Row:
    """One JSON object as a Row: the first shape whose fields it has.

    Raises DataError naming the nearest shape if none fits.
    """
    if deeper_than(fields, MAX_DEPTH):
        raise DataError(f"row {row}: nested deeper than {MAX_DEPTH} levels", next="flatten the row")
    for shape, (needed, build) in SHAPES.items():
        if all(fields.get(name) is not None for name in needed):
            result = build(fields, row, shape)
            if isinstance(result, Conversation):
                _check_conversation(result)
            return result
    raise DataError(_no_shape(fields, row), next="rename the fields to one of: " + ", ".join(SHAPES))


def _no_shape(fields: Fields, row: int) -> str:
    if not fields:
        return f"row {row}: the object is empty"

    def score(needed: Iterable[str]) -> tuple[int, int]:
        return sum(fields.get(name) is not None for name in needed), sum(
            bool(nearest(name, fields)) for name in needed
        )

    shape, (needed, _) = max(SHAPES.items(), key=lambda item: score(item[1][0]))
    missing = next(name for name in needed if fields.get(name) is None)
    if missing in fields:
        return f"row {row}: field {missing!r} is null"
    return (
        f"row {row}: fields {sorted(fields)} fit no shape; nearest shape {shape}, field {missing!r} is"
        f" missing{nearest(missing, fields)}"
    )


def _messages_row(fields: Fields, row: int, shape: str) -> Row:
    items = [(f"messages[{i}]", item) for i, item in enumerate(list_of(fields["messages"], row, "messages"))]
    return _conversation(items, fields, row, shape)


def _conversation(
    items: Sequence[tuple[str, object]], fields: Fields, row: int, shape: str, prompt: int = 0
) -> Conversation:
    """Messages with their places in the row; the first `prompt` of them are asked, not taught."""
    messages = [message_of(item, row, where) for where, item in items]
    asked = {i for i, (where, item) in enumerate(items) if i < prompt or not carries_loss(item, row, where)}
    context = frozenset(i for i in asked if messages[i]["role"] == "assistant")
    return Conversation(messages, tools_of(fields, row), row, shape, context)


def _sharegpt_row(fields: Fields, row: int, shape: str) -> Row:
    messages: list[Message] = _system(fields, row)
    for i, item in enumerate(list_of(fields["conversations"], row, "conversations")):
        where = f"conversations[{i}]"
        turn = object_of(item, row, where)
        if "from" not in turn and "role" in turn:
            raise DataError(
                f"row {row}: field {where} has role and content, not from and value",
                next="rename conversations to messages",
            )
        name = text_of(turn.get("from"), row, f"{where}.from")
        if name not in SHAREGPT_ROLES:
            raise DataError(
                f"row {row}: field {where}.from is {name!r}; known:"
                f" {', '.join(SHAREGPT_ROLES)}{nearest(name, SHAREGPT_ROLES)}"
            )
        role = SHAREGPT_ROLES[name]
        value = text_of(turn.get("value"), row, f"{where}.value", empty=role in ("system", "tool"))
        calls = _function_calls(value, row, f"{where}.value") if name == "function_call" else None
        messages.append(
            {"role": role, "content": None, "tool_calls": calls}
            if calls
            else {"role": role, "content": value}
        )
    return Conversation(messages, tools_of(fields, row), row, shape)


def _pair_row(first: str, second: str) -> Callable[[Fields, int, str], Row]:
    """What is asked and what is taught, as two texts or as two lists of messages."""

    def build(fields: Fields, row: int, shape: str) -> Row:
        asked, taught = fields[first], fields[second]
        if isinstance(asked, list) and isinstance(taught, list):
            items = [(f"{first}[{i}]", item) for i, item in enumerate(asked)]
            items += [(f"{second}[{i}]", item) for i, item in enumerate(taught)]
            return _conversation(items, fields, row, shape, prompt=len(asked))
        system = _system(fields, row)
        return _turns(system, text_of(asked, row, first), text_of(taught, row, second), row, shape)

    return build


def _alpaca_row(fields: Fields, row: int, shape: str) -> Row:
    instruction = text_of(fields["instruction"], row, "instruction")
    given = fields.get("input")
    context = "" if given is None else text_of(given, row, "input", empty=True)
    user = f"{instruction}\n\n{context}" if context.strip() else instruction
    return _turns(_system(fields, row), user, text_of(fields["output"], row, "output"), row, shape)


def _text_row(fields: Fields, row: int, shape: str) -> Row:
    return Text(text_of(fields["text"], row, "text"), row, shape)


SHAPES: dict[str, tuple[tuple[str, ...], Callable[[Fields, int, str], Row]]] = {
    "messages": (("messages",), _messages_row),
    "conversations": (("conversations",), _sharegpt_row),
    "prompt/completion": (("prompt", "completion"), _pair_row("prompt", "completion")),
    "question/answer": (("question", "answer"), _pair_row("question", "answer")),
    "instruction/output": (("instruction", "output"), _alpaca_row),
    "text": (("text",), _text_row),
}


def _turns(system: list[Message], user: str, assistant: str, row: int, shape: str) -> Conversation:
    return Conversation(
        [*system, {"role": "user", "content": user}, {"role": "assistant", "content": assistant}],
        None,
        row,
        shape,
    )


def _system(fields: Fields, row: int) -> list[Message]:
    """The optional `system` field beside a shape; "" and null mean none."""
    given = fields.get("system")
    if given is None:
        return []
    text = text_of(given, row, "system", empty=True)
    return [{"role": "system", "content": text}] if text.strip() else []


def _function_calls(value: str, row: int, where: str) -> list[Tool]:
    """ShareGPT's function_call: one {"name", "arguments"} or a list of them, as JSON text."""
    calls = json_of(value, row, f"{where} (function_call)")
    return [
        tool_call_of(call, row, where)
        for call in (list_of(calls, row, where) if isinstance(calls, list) else [calls])
    ]


def _check_conversation(conversation: Conversation) -> None:
    if not conversation.taught:
        lost = " that carries loss (weight, train)" if conversation.context else ""
        raise DataError(
            f"row {conversation.row}: field messages has no turn of the assistant{lost}, so nothing to learn"
        )
