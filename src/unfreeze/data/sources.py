"""Data files to rows: JSON Lines in six shapes, and plain text. Every complaint names the row (its line in the file) and the field.

| shape                       | fields                                                           | becomes                                   |
| --------------------------- | ---------------------------------------------------------------- | ----------------------------------------- |
| messages                    | messages: [{role, content, reasoning_content?, tool_calls?}], … | the conversation as it stands             |
| conversations (ShareGPT)    | conversations: [{from, value}], system?, tools?                  | human → user, gpt → assistant;            |
|                             | function_call, observation                                       | a tool call and its return                |
| prompt/completion           | two texts (or two lists of messages)                             | user turn, assistant turn                 |
| question/answer             | two texts                                                        | user turn, assistant turn                 |
| instruction/output (alpaca) | instruction, input?, output, system?                             | instruction + blank line + input, output  |
| text                        | text                                                             | one document, loss on all of it           |

Shapes may be mixed in one file; each row takes the first shape of this table whose fields it has, and `Row.shape` says which.
Fields that belong to no shape (id, source, …) are left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from unfreeze.core.errors import DataError, nearest
from unfreeze.core.units import format_bytes

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "function_call": "assistant", "observation": "tool",
}  # fmt: skip
MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which rows hold a turn's reasoning and templates read it (gpt-oss: thinking). In a Conversation it is reasoning_content."""
DOCUMENT_MARK = "<|endoftext|>"
"""A line that holds only this separates the documents of a .txt file (the TinyStories convention)."""

MAX_ROW_BYTES = 64 * 2**20
"""A longer line (or document of a text file) is a bad row: it bounds what reading holds in memory. 64 MiB are some 16 million tokens."""

MAX_DEPTH = 200
"""Lists and objects within one another; a tool's schema has a dozen. Rendering and quoting a row takes two frames of the stack a level."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template; loss on the assistant's turns. `row` is the line in the file, counted from 1.

    context   places of assistant's turns that carry no loss: those of a prompt, and those with "weight": 0 or "train": false
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    row: int = 0
    shape: str = "messages"
    context: frozenset[int] = frozenset()

    @property
    def taught(self) -> list[int]:
        """Places of the turns that carry loss."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant" and i not in self.context]


@dataclass(frozen=True)
class Text:
    """One document; loss on every token."""

    text: str
    row: int = 0
    shape: str = "text"


Row = Conversation | Text


@dataclass(frozen=True)
class BadRow:
    """A row that could not be used, and why; `file` is its name where there are several."""

    row: int
    reason: str
    file: str = ""


class Place(NamedTuple):
    """Where a row's bytes lie in its file, and its number."""

    row: int
    offset: int
    size: int


def read_rows(path: str | Path, on_bad: Callable[[BadRow], None] | None = None) -> Iterator[Row]:
    """The rows of a .jsonl (or .json) or .txt file, one after the other; the file is never held whole.

    A bad row raises DataError; with `on_bad` it is handed over instead and reading goes on (count them: nothing may vanish).
    .txt: documents are separated by lines `<|endoftext|>` if the file has any, else by blank lines.
    """
    return (row for _, row in read_places(path, on_bad))


def read_places(path: str | Path, on_bad: Callable[[BadRow], None] | None = None) -> Iterator[tuple[Place, Row]]:
    """As read_rows, each row with its place, by which read_at finds it again. At most one row (MAX_ROW_BYTES) is held."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"no data file at {path}{nearest(path.name, _neighbours(path))}", next="--data FILE.jsonl")
    if path.suffix not in (".jsonl", ".json", ".txt"):
        raise DataError(f"{path.name}: ending {path.suffix!r} is not read; .jsonl (one JSON object per line) or .txt")
    parse = _parser(path)
    with path.open("rb") as file:
        for place, raw in _documents(file, path) if path.suffix == ".txt" else _lines(file, path):
            try:
                if place.size > MAX_ROW_BYTES:
                    raise DataError(
                        f"row {place.row}: {format_bytes(place.size)} in one row, at most {format_bytes(MAX_ROW_BYTES)}; is a line break missing?"
                    )
                yield place, parse(raw, place.row)
            except DataError as error:
                if on_bad is None:
                    raise DataError(f"{path.name}, {error.message}", next=error.next or "mend the row, or --on-bad-row skip") from None
                on_bad(BadRow(place.row, error.message))


def read_at(file: IO[bytes], path: Path, place: Place) -> Row:
    """One row again, from the file opened for reading bytes. Raises DataError if the file has changed and holds no row there."""
    file.seek(place.offset)
    return _parser(path)(file.read(place.size), place.row)


def _parser(path: Path) -> Callable[[bytes, int], Row]:
    return _parse_text if path.suffix == ".txt" else _parse_json


def _neighbours(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []


def _bounded_lines(file: IO[bytes], path: Path) -> Iterator[tuple[Place, bytes]]:
    """(place, bytes) of each line without a byte order mark. Split at \\n only: U+2028 and its kin may stand inside JSON strings.

    Of a line longer than MAX_ROW_BYTES only the beginning is given; its size is the true one.
    """
    offset, number = 0, 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        size = len(line)
        while not line.endswith(b"\n") and size > MAX_ROW_BYTES and (rest := file.readline(MAX_ROW_BYTES)):
            size += len(rest)
            if rest.endswith(b"\n"):
                break
        whole, mark = line, 0
        if number == 1:
            whole = _without_bom(line, path)
            mark = len(line) - len(whole)
        yield Place(number, offset + mark, size - mark), whole
        offset += size


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[Place, bytes]]:
    """The lines that are not blank."""
    return ((place, line) for place, line in _bounded_lines(file, path) if line.strip())


def _documents(file: IO[bytes], path: Path) -> Iterator[tuple[Place, bytes]]:
    """(place, bytes) of each document of a text file; its row is its first line's."""
    mark = DOCUMENT_MARK.encode()
    marked = any(line.strip() == mark for _, line in _bounded_lines(file, path))
    file.seek(0)
    first: Place | None = None
    lines: list[bytes] = []
    size = 0
    for place, line in _bounded_lines(file, path):
        ends = line.strip() == mark if marked else not line.strip()
        if ends or (first is None and not line.strip()):
            if first is not None:
                yield Place(first.row, first.offset, size), b"".join(lines)
            first, lines, size = None, [], 0
            continue
        first = first or place
        size += place.size
        if size <= MAX_ROW_BYTES:
            lines.append(line)
    if first is not None:
        yield Place(first.row, first.offset, size), b"".join(lines)


def _without_bom(line: bytes, path: Path) -> bytes:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path.name} is UTF-16; UTF-8 is read", next=f"iconv -f UTF-16 -t UTF-8 {path} > utf8{path.suffix}")
    return line.removeprefix(b"\xef\xbb\xbf")


def _decode(raw: bytes, row: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"row {row}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8") from None


def _parse_text(raw: bytes, row: int) -> Row:
    return Text(_decode(raw, row).strip(), row)


def _parse_json(raw: bytes, row: int) -> Row:
    text = _decode(raw, row)
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        if row == 1 and text.lstrip().startswith("["):
            raise DataError("row 1: this is a JSON array, not one object per line", next="jq -c '.[]' data.json > data.jsonl") from None
        raise DataError(f"row {row}: broken JSON at column {min(error.pos, len(text.rstrip())) + 1}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # duplicate keys, NaN, numbers of thousands of digits, endless nesting
        raise DataError(f"row {row}: broken JSON: {str(error) or type(error).__name__}") from None
    if not isinstance(value, dict):
        hint = "jq -c '.[]' data.json > data.jsonl" if isinstance(value, list) else ""
        raise DataError(f"row {row}: expected a JSON object, got {_kind(value)}", next=hint)
    return row_from_dict(value, row)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {twice!r} stands twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def row_from_dict(fields: Mapping[str, Any], row: int = 0) -> Row:
    """One JSON object as a Row: the first shape whose fields it has. Raises DataError naming the nearest shape if none fits."""
    if deeper_than(fields, MAX_DEPTH):
        raise DataError(f"row {row}: nested deeper than {MAX_DEPTH} levels", next="flatten the row")
    for shape, (needed, build) in SHAPES.items():
        if all(fields.get(name) is not None for name in needed):
            result = build(fields, row, shape)
            if isinstance(result, Conversation):
                _check_conversation(result)
            return result
    raise DataError(_no_shape(fields, row), next="rename the fields to one of: " + ", ".join(SHAPES))


def deeper_than(value: object, most: int) -> bool:
    """Whether lists and objects stand in one another more than `most` times; what walks a row goes a level at a time into the stack."""
    level: list[object] = [value]
    for _ in range(most + 1):
        level = [item for node in level for item in (node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ())]
        if not level:
            return False
    return True


def _no_shape(fields: Mapping[str, Any], row: int) -> str:
    if not fields:
        return f"row {row}: the object is empty"

    def score(needed: Iterable[str]) -> tuple[int, int]:
        return sum(fields.get(name) is not None for name in needed), sum(bool(nearest(name, fields)) for name in needed)

    shape, (needed, _) = max(SHAPES.items(), key=lambda item: score(item[1][0]))
    missing = next(name for name in needed if fields.get(name) is None)
    if missing in fields:
        return f"row {row}: field {missing!r} is null"
    return f"row {row}: fields {sorted(fields)} fit no shape; nearest shape {shape}, field {missing!r} is missing{nearest(missing, fields)}"


def _messages_row(fields: Mapping[str, Any], row: int, shape: str) -> Row:
    items = [(f"messages[{i}]", item) for i, item in enumerate(_list(fields["messages"], row, "messages"))]
    return _conversation(items, fields, row, shape)


def _conversation(items: Sequence[tuple[str, Any]], fields: Mapping[str, Any], row: int, shape: str, prompt: int = 0) -> Conversation:
    """Messages with their places in the row; the first `prompt` of them are asked, not taught."""
    messages = [_message(item, row, where) for where, item in items]
    asked = {i for i, (where, item) in enumerate(items) if i < prompt or not _carries_loss(item, row, where)}
    context = frozenset(i for i in asked if messages[i]["role"] == "assistant")
    return Conversation(messages, _tools(fields, row), row, shape, context)


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages given in Python, checked and brought into the form that rows have; they may be empty. Raises DataError naming the field."""
    try:
        return [_message(dict(message), 0, f"messages[{i}]", empty=True) for i, message in enumerate(messages)]
    except DataError as error:
        raise DataError(error.message.removeprefix("row 0: "), next=error.next) from None


def _carries_loss(item: Any, row: int, where: str) -> bool:
    """A turn's "weight" (0 or 1, as OpenAI's files have it) or "train" (true or false)."""
    message = _object(item, row, where)
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise DataError(f"row {row}: field {where}.weight is {weight!r}; a turn's weight is 0 or 1")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"row {row}: field {where}.train is {_kind(train)}, expected true or false")
    return weight != 0 and train is not False


def _sharegpt_row(fields: Mapping[str, Any], row: int, shape: str) -> Row:
    messages: list[Message] = _system(fields, row)
    for i, item in enumerate(_list(fields["conversations"], row, "conversations")):
        where = f"conversations[{i}]"
        turn = _object(item, row, where)
        if "from" not in turn and "role" in turn:
            raise DataError(f"row {row}: field {where} has role and content, not from and value", next="rename conversations to messages")
        name = _text(turn.get("from"), row, f"{where}.from")
        if name not in SHAREGPT_ROLES:
            raise DataError(f"row {row}: field {where}.from is {name!r}; known: {', '.join(SHAREGPT_ROLES)}{nearest(name, SHAREGPT_ROLES)}")
        role = SHAREGPT_ROLES[name]
        value = _text(turn.get("value"), row, f"{where}.value", empty=role in ("system", "tool"))
        calls = _function_calls(value, row, f"{where}.value") if name == "function_call" else None
        messages.append({"role": role, "content": None, "tool_calls": calls} if calls else {"role": role, "content": value})
    return Conversation(messages, _tools(fields, row), row, shape)


def _pair_row(first: str, second: str) -> Callable[[Mapping[str, Any], int, str], Row]:
    def build(fields: Mapping[str, Any], row: int, shape: str) -> Row:
        if isinstance(fields[first], list) and isinstance(fields[second], list):
            items = [(f"{name}[{i}]", item) for name in (first, second) for i, item in enumerate(fields[name])]
            return _conversation(items, fields, row, shape, prompt=len(fields[first]))
        return _turns(_system(fields, row), _text(fields[first], row, first), _text(fields[second], row, second), row, shape)

    return build


def _alpaca_row(fields: Mapping[str, Any], row: int, shape: str) -> Row:
    instruction = _text(fields["instruction"], row, "instruction")
    given = fields.get("input")
    context = "" if given is None else _text(given, row, "input", empty=True)
    user = f"{instruction}\n\n{context}" if context.strip() else instruction
    return _turns(_system(fields, row), user, _text(fields["output"], row, "output"), row, shape)


def _text_row(fields: Mapping[str, Any], row: int, shape: str) -> Row:
    return Text(_text(fields["text"], row, "text"), row, shape)


SHAPES: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any], int, str], Row]]] = {
    "messages": (("messages",), _messages_row),
    "conversations": (("conversations",), _sharegpt_row),
    "prompt/completion": (("prompt", "completion"), _pair_row("prompt", "completion")),
    "question/answer": (("question", "answer"), _pair_row("question", "answer")),
    "instruction/output": (("instruction", "output"), _alpaca_row),
    "text": (("text",), _text_row),
}


def _turns(system: list[Message], user: str, assistant: str, row: int, shape: str) -> Conversation:
    return Conversation([*system, {"role": "user", "content": user}, {"role": "assistant", "content": assistant}], None, row, shape)


def _system(fields: Mapping[str, Any], row: int) -> list[Message]:
    """The optional `system` field beside a shape; "" and null mean none."""
    given = fields.get("system")
    if given is None:
        return []
    text = _text(given, row, "system", empty=True)
    return [{"role": "system", "content": text}] if text.strip() else []


def _message(item: Any, row: int, where: str, *, empty: bool = False) -> Message:
    """A message with its null fields dropped (tables write them for every row) and the rest checked. `empty`: its content may be."""
    message = {name: value for name, value in _object(item, row, where).items() if value is not None}
    role = _text(message.get("role"), row, f"{where}.role")
    if role not in ROLES:
        raise DataError(f"row {row}: field {where}.role is {role!r}; known: {', '.join(ROLES)}{nearest(role, ROLES)}")
    message = {name: value for name, value in message.items() if name not in ("weight", "train")}
    for name in message:
        if name not in (*MESSAGE_FIELDS, *REASONING_NAMES) and nearest(name, MESSAGE_FIELDS):
            raise DataError(f"row {row}: field {where}.{name} is not known{nearest(name, MESSAGE_FIELDS)}")
    calls = [
        _tool_call(call, row, f"{where}.tool_calls[{i}]")
        for i, call in enumerate(_list(message.pop("tool_calls", []), row, f"{where}.tool_calls", empty=True))
    ]
    message = {**_one_reasoning(message, row, where), **({"tool_calls": calls} if calls else {})}
    if "content" not in message and calls:
        return {**message, "content": None}  # templates test `content is none` for a turn that only calls tools
    may_be_empty = empty or role in ("system", "tool") or bool(calls)
    return {**message, "content": _content(message.get("content"), row, f"{where}.content", empty=may_be_empty)}


def _one_reasoning(message: Message, row: int, where: str) -> Message:
    """A turn's reasoning as reasoning_content, whichever of its names the row uses."""
    given = [name for name in REASONING_NAMES if name in message]
    texts = {name: _text(message.pop(name), row, f"{where}.{name}", empty=True) for name in given}
    said = {text for text in texts.values() if text.strip()}
    if len(said) > 1:
        raise DataError(f"row {row}: fields {' and '.join(f'{where}.{name}' for name in given)} hold different reasoning", next="keep one of them")
    return {**message, "reasoning_content": said.pop()} if said else message


def _tool_call(value: Any, row: int, where: str) -> dict[str, Any]:
    """{"id"?, "type", "function": {"name", "arguments": {…}}}.

    The flat form {"name", "arguments"} and arguments written as JSON text are taken too.
    """
    call = _object(value, row, where)
    inside = "function" in call
    function = _object(call["function"], row, f"{where}.function") if inside else call
    at = f"{where}.function" if inside else where
    name = _text(function.get("name"), row, f"{at}.name")
    known = {key: item for key, item in call.items() if key not in ("function", "name", "arguments") and item is not None}
    return {"type": "function", **known, "function": {"name": name, "arguments": _arguments(function.get("arguments"), row, f"{at}.arguments")}}


def _arguments(value: Any, row: int, where: str) -> dict[str, Any]:
    """A call's arguments as an object. OpenAI's files hold them as JSON text; a template that spells them out would put that in quotes again."""
    if isinstance(value, str):
        value = _json(value, row, where) if value.strip() else {}
    return _object({} if value is None else value, row, where)


def _json(text: str, row: int, where: str) -> Any:
    """JSON that a field holds as text."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"row {row}: field {where} is text that is not JSON ({text[:40]!r}): {error or type(error).__name__}") from None
    if deeper_than(value, MAX_DEPTH):
        raise DataError(f"row {row}: field {where} is nested deeper than {MAX_DEPTH} levels", next="flatten it")
    return value


def _function_calls(value: str, row: int, where: str) -> list[dict[str, Any]]:
    """ShareGPT's function_call: one {"name", "arguments"} or a list of them, as JSON text."""
    calls = _json(value, row, f"{where} (function_call)")
    return [_tool_call(call, row, where) for call in (_list(calls, row, where) if isinstance(calls, list) else [calls])]


def _content(value: Any, row: int, where: str, *, empty: bool) -> Any:
    """Text, or the list form [{"type": "text", "text": …}]; other kinds of part are refused: there is no model here that sees them."""
    if not isinstance(value, list):
        return _text(value, row, where, empty=empty)
    for i, part in enumerate(_list(value, row, where, empty=empty)):
        if _object(part, row, f"{where}[{i}]").get("type", "text") != "text":
            raise DataError(f"row {row}: field {where}[{i}].type is {part['type']!r}; only text is trained on")
        _text(part.get("text"), row, f"{where}[{i}].text", empty=empty)
    return value


def _tools(fields: Mapping[str, Any], row: int) -> list[dict[str, Any]] | None:
    """`tools` as a list of JSON schemas, or as the same list written into a string."""
    tools = fields.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, row, "tools")
    if not tools:
        return None
    return [_tool(tool, row, f"tools[{i}]") for i, tool in enumerate(_list(tools, row, "tools"))]


def _tool(value: Any, row: int, where: str) -> dict[str, Any]:
    """A tool's schema as OpenAI and transformers write it; ShareGPT files often leave out what is around the function."""
    tool = _object(value, row, where)
    if tool.get("function") is not None:
        _object(tool["function"], row, f"{where}.function")
        return tool
    return {"type": "function", "function": tool} if "name" in tool else tool


def _check_conversation(conversation: Conversation) -> None:
    if not conversation.taught:
        lost = " that carries loss (weight, train)" if conversation.context else ""
        raise DataError(f"row {conversation.row}: field messages has no turn of the assistant{lost}, so nothing to learn")


def _list(value: Any, row: int, where: str, *, empty: bool = False) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"row {row}: field {where} is {_kind(value)}, expected a list")
    if not value and not empty:
        raise DataError(f"row {row}: field {where} is empty")
    return value


def _object(value: Any, row: int, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"row {row}: field {where} is {_kind(value)}, expected an object")
    return value


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def _text(value: Any, row: int, where: str, *, empty: bool = False) -> str:
    if value is None:
        raise DataError(f"row {row}: field {where} is missing")
    if not isinstance(value, str):
        raise DataError(f"row {row}: field {where} is {_kind(value)}, expected a text")
    if not empty and not value.strip():
        raise DataError(f"row {row}: field {where} is empty")
    found = _LONE_SURROGATE.search(value)
    if found:
        raise DataError(f"row {row}: field {where} has half a surrogate pair (\\u{ord(found.group()):04x}) at character {found.start()}")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else f"{names[type(value)]} ({str(value)[:40]})"
