"""The shapes of JSON rows. A row takes the first shape whose fields it has; `Row.shape` says which.

messages             messages: [{role, content, reasoning_content?, tool_calls?}, …], system?: used as is
conversations        ShareGPT: conversations: [{from, value}, …], system?, tools?: human -> user, gpt ->
                     assistant, function_call and observation -> a tool call and its result
prompt/completion    two texts, or two lists of messages: the prompt, and the part to train on
question/answer      two texts: a user's turn and the assistant's
instruction/output   alpaca: instruction, input?, output, system?, history?: instruction, blank line, input;
                     output
text                 text: one document, loss on all of it

One file may mix shapes. Fields that belong to no shape (id, source, …) are ignored. Rows for other kinds of
training (preference pairs, rewards) are recognised and refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from unfreeze.config.synonyms import COMMANDS
from unfreeze.core.errors import DataError, near_word, nearest
from unfreeze.data.rows.fields import MAX_DEPTH, deeper_than, json_of, list_of, object_of, text_of
from unfreeze.data.rows.messages import WITHOUT_ROWS, carries_loss, message_of, tool_call_of, tools_of
from unfreeze.data.rows.row import Answers, Conversation, Message, Row, Text, Tool
from unfreeze.untrusted.json_object import is_list, is_object

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

SENSES = ("image", "video", "audio")
LABELS = frozenset("true false 0 1 0.0 1.0".split())
"""Values of KTO's label in any file format, in lower case."""

Fields = Mapping[str, object]


def row_from_dict(fields: Fields, row: int = 0, renames: Mapping[str, str] | None = None) -> Row:
    """Convert one JSON object to a Row of the first shape whose fields it has.

    renames: field -> column, from --columns; shapes that use one of these fields take precedence.
    Raises DataError naming the missing fields.
    """
    if deeper_than(fields, MAX_DEPTH):
        raise DataError(f"row {row}: nested deeper than {MAX_DEPTH} levels", next="flatten the row")
    renames = renames or {}
    there = {name for name, value in fields.items() if value is not None}
    whole = [shape for shape, (needed, _) in SHAPES.items() if there.issuperset(needed)]
    preferred = [shape for shape in whole if renames and renames.keys() & SHAPES[shape][0]]
    if not preferred:
        _refuse_other_training(fields, row)
    if whole:
        refuse_other_senses(fields, row)
    if whole:
        shape = (preferred or whole)[0]
        result = SHAPES[shape][1](fields, row, shape)
        if isinstance(result, Conversation):
            _check_conversation(result)
        return result
    _refuse_within(fields, row)
    empty = _null(fields)
    if empty:
        raise DataError(f"row {row}: field {empty!r} is null")
    raise _no_shape(list(fields), row, renames)


def check_names(there: Sequence[str], renames: Mapping[str, str], what: str) -> None:
    """Raise DataError for a table whose rows cannot have any shape.

    there: its columns, as in the file; renames: field -> column, from --columns
    """
    names = [*renames, *(name for name in there if name not in renames.values())]
    shapes = [needed for needed, _ in SHAPES.values()] + [("chosen", "rejected")]
    if not any(set(needed) <= set(names) for needed in shapes):
        error = _no_shape(names, 0, renames)
        raise DataError(f"{what}: {error.message.removeprefix('row 0: ')}", next=error.next)


class OtherTraining(DataError):
    """A row that sft refuses but `unfreeze prefer` can read as `answers`."""

    def __init__(self, message: str, *, next: str, answers: Answers):
        super().__init__(message, next=next)
        self.answers: Answers = answers


def _refuse_other_training(fields: Fields, row: int) -> None:
    """Refuse rows that would make sft train on answers marked as bad."""
    label = fields.get("label")
    if fields.get("chosen") is not None and fields.get("rejected") is not None:
        taught = "messages" if isinstance(fields["chosen"], list) and "prompt" not in fields else "completion"
        raise OtherTraining(
            f"row {row}: a pair of answers (chosen, rejected); prefer compares them"
            f" (sft learns one: --columns {taught}=chosen)",
            next=COMMANDS["dpo"].next,
            answers="pairs",
        )
    if "completion" in fields and str(label).lower() in LABELS:
        raise OtherTraining(
            f"row {row}: an answer with a label (completion, label); prefer learns from them by KTO"
            " (sft: keep the good rows, without label)",
            next=COMMANDS["kto"].next,
            answers="labels",
        )
    if fields.get("completions") is not None and fields.get("labels") is not None:
        raise DataError(
            f"row {row}: steps with labels (completions, labels: a reward model's);"
            f" {COMMANDS['reward-model'].text}",
            next="give rows of prompt and completion",
        )


def refuse_other_senses(fields: Fields, row: int) -> None:
    """Refuse rows whose text refers to an image, video or audio that the model does not get."""
    for sense in SENSES:
        several, one = fields.get(f"{sense}s"), fields.get(sense)
        marked = one is not None and (not isinstance(one, str) or (one and f"<{sense}>" in str(fields)))
        if several or marked:
            raise DataError(
                f"row {row}: field {(f'{sense}s' if several else sense)!r} cannot be used by a language"
                " model",
                next=f"{WITHOUT_ROWS}if the text makes sense alone, remove the field",
            )


def _refuse_within(fields: Fields, row: int) -> None:
    """Refuse a row that is nested in the object, has another name, or is wrapped in a list."""
    if {"role", "content"} <= fields.keys():
        raise DataError(
            f"row {row}: one message (role, content), not a row of messages",
            next="jq -c '{messages: .}' FILE > rows.jsonl (if a line is a list of messages)",
        )
    for name, value in fields.items():
        first = value[0] if is_list(value) and value else None
        if not is_object(first):
            continue
        for shape, keys in (("messages", {"role", "content"}), ("conversations", {"from", "value"})):
            if keys <= first.keys():
                raise DataError(
                    f"row {row}: field {shape!r} is missing; field {name!r} looks like it",
                    next=f"--columns {shape}={name}",
                )
        if any(set(needed) <= first.keys() for needed, _ in SHAPES.values()):
            raise DataError(
                f"row {row}: the rows are a list in field {name!r}",
                next=f"jq -c '.{name}[]' FILE > rows.jsonl",
            )


def _null(fields: Fields) -> str | None:
    """Return the null field that keeps a row from its nearest shape, if there is one."""
    needed = max((needed for needed, _ in SHAPES.values()), key=lambda names: _score(names, fields))
    return next((name for name in needed if name in fields and fields[name] is None), None)


def _score(needed: Sequence[str], fields: Mapping[str, object] | Sequence[str]) -> tuple[int, int]:
    """Score how well a shape fits: exact fields first, then similarly named ones."""
    there = [name for name in fields if not isinstance(fields, Mapping) or fields[name] is not None]
    return sum(name in there for name in needed), sum(bool(near_field(name, list(fields))) for name in needed)


def _no_shape(names: Sequence[str], row: int, renames: Mapping[str, str]) -> DataError:
    """Return the error: the fields missing for the nearest shape, and a complete --columns to supply them.

    names: the row's fields, already renamed
    """
    if not names:
        return DataError(f"row {row}: the object is empty", next="remove the row, or --data.on-bad-row skip")
    there = ", ".join(sorted(renames.get(name, name) for name in names)[:20])
    needed = max((needed for needed, _ in SHAPES.values()), key=lambda fields: _score(fields, names))
    missing = [name for name in needed if name not in names]
    near: dict[str, str] = {}
    for name in missing:
        left = [other for other in names if other not in (*needed, *renames, *near.values())]
        if word := near_field(name, left):
            near[name] = word
    if not near and len(missing) == len(needed):
        return DataError(
            f"row {row}: no known field among: {there}",
            next=f"--columns prompt=NAME,completion=NAME, or rename them to one of: {', '.join(SHAPES)}",
        )
    several = len(missing) > 1
    problem = f"field{'s' * several} {' and '.join(map(repr, missing))} {'are' if several else 'is'} missing"
    columns = {**renames, **dict.fromkeys(missing, "NAME"), **near}
    pairs = ",".join(f"{ours}={column}" for ours, column in columns.items())
    return DataError(
        f"row {row}: {problem}" + (f"; fields: {there}" if len(near) < len(missing) else ""),
        next=f"--columns {shlex.quote(pairs) if ' ' in pairs else pairs}",
    )


def near_field(name: str, others: Sequence[str]) -> str:
    """Return the field that `name` most likely means, ignoring case; "" if there is none."""
    lower = {other.lower(): other for other in others}
    return lower.get(near_word(name, lower), "")


def _messages_row(fields: Fields, row: int, shape: str) -> Row:
    items = [(f"messages[{i}]", item) for i, item in enumerate(list_of(fields["messages"], row, "messages"))]
    return conversation_of(items, fields, row, shape)


def conversation_of(
    items: Sequence[tuple[str, object]], fields: Fields, row: int, shape: str, prompt: int = 0
) -> Conversation:
    """Build a conversation from messages with their locations; the first `prompt` of them carry no loss."""
    turns = [
        (message_of(item, row, where), carries_loss(item, row, where) and i >= prompt)
        for i, (where, item) in enumerate(items)
    ]
    return _with_system(turns, fields, row, shape)


def _with_system(turns: Sequence[tuple[Message, bool]], fields: Fields, row: int, shape: str) -> Conversation:
    """Build a conversation from (turn, carries loss), after the row's system prompt."""
    system = _system(fields, row)
    if system and turns and turns[0][0]["role"] == "system":
        if turns[0][0]["content"] != system[0]["content"]:
            raise DataError(
                f"row {row}: field system and the first turn are different system prompts",
                next="keep one of them",
            )
        system = []
    messages = [*system, *(message for message, _ in turns)]
    no_loss = {i for i, (_, loss) in enumerate(turns, len(system)) if not loss}
    context = frozenset(i for i in no_loss if messages[i]["role"] == "assistant")
    return Conversation(messages, tools_of(fields, row), row, shape, context)


def _sharegpt_row(fields: Fields, row: int, shape: str) -> Row:
    turns: list[tuple[Message, bool]] = []
    for i, item in enumerate(list_of(fields["conversations"], row, "conversations")):
        where = f"conversations[{i}]"
        turn = object_of(item, row, where)
        if "from" not in turn and "role" in turn:
            raise DataError(
                f"row {row}: field {where} has role and content, not from and value",
                next="--columns messages=conversations",
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
        message: Message = {"role": role, "content": value}
        if calls:
            message = {"role": role, "content": None, "tool_calls": calls}
        turns.append((message, carries_loss(item, row, where)))
    return _with_system(turns, fields, row, shape)


def _pair_row(first: str, second: str) -> Callable[[Fields, int, str], Row]:
    """Return a builder for (prompt, answer) fields: two texts or two lists of messages."""

    def build(fields: Fields, row: int, shape: str) -> Row:
        prompt, answer = fields[first], fields[second]
        if is_list(prompt) and is_list(answer):
            items = [(f"{first}[{i}]", item) for i, item in enumerate(prompt)]
            items += [(f"{second}[{i}]", item) for i, item in enumerate(answer)]
            return conversation_of(items, fields, row, shape, prompt=len(prompt))
        system = _system(fields, row)
        return _turns(system, text_of(prompt, row, first), text_of(answer, row, second), row, shape)

    return build


def _alpaca_row(fields: Fields, row: int, shape: str) -> Row:
    user = with_input(fields, row)
    before = _system(fields, row) + history_of(fields.get("history"), row)
    return _turns(before, user, text_of(fields["output"], row, "output"), row, shape)


def with_input(fields: Fields, row: int) -> str:
    """Return alpaca's instruction, followed by an empty line and its input if it has one."""
    instruction = text_of(fields["instruction"], row, "instruction")
    value = fields.get("input")
    context = "" if value is None else text_of(value, row, "input", empty=True)
    return f"{instruction}\n\n{context}" if context.strip() else instruction


def history_of(value: object, row: int) -> list[Message]:
    """Return the earlier turns of a LLaMA-Factory row, [[instruction, answer], …].

    Their answers are trained on too.
    """
    if isinstance(value, str) and value.strip():
        value = json_of(value, row, "history")
    turns: list[Message] = []
    for i, item in enumerate(list_of(value or [], row, "history", empty=True)):
        pair = list_of(item, row, f"history[{i}]")
        if len(pair) != 2:
            raise DataError(
                f"row {row}: field history[{i}] has {len(pair)} texts instead of a question and an answer"
            )
        texts = [text_of(text, row, f"history[{i}][{j}]") for j, text in enumerate(pair)]
        turns += [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    return turns


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


NEEDED = frozenset(name for needed, _ in SHAPES.values() for name in needed)
"""Fields that make up a shape."""
BESIDE = [
    *"input system history tools functions chosen rejected label completions labels".split(),
    *(name for sense in SENSES for name in (sense, f"{sense}s")),
]
NAMES = (*sorted(NEEDED), *BESIDE)
"""Fields that are read."""


def _turns(system: list[Message], user: str, assistant: str, row: int, shape: str) -> Conversation:
    return Conversation(
        [*system, {"role": "user", "content": user}, {"role": "assistant", "content": assistant}],
        None,
        row,
        shape,
    )


def _system(fields: Fields, row: int) -> list[Message]:
    """Return the optional `system` field of a row; "" and null mean none."""
    value = fields.get("system")
    if value is None:
        return []
    text = text_of(value, row, "system", empty=True)
    return [{"role": "system", "content": text}] if text.strip() else []


def _function_calls(value: str, row: int, where: str) -> list[Tool]:
    """Parse ShareGPT's function_call: one {"name", "arguments"} or a list of them, as JSON text."""
    calls = json_of(value, row, f"{where} (function_call)")
    return [
        tool_call_of(call, row, where) for call in (list_of(calls, row, where) if is_list(calls) else [calls])
    ]


def _check_conversation(conversation: Conversation) -> None:
    if not conversation.taught:
        lost = " that carries loss (weight, train)" if conversation.context else ""
        raise DataError(
            f"row {conversation.row}: field messages has no assistant turn{lost}: nothing to learn"
        )
