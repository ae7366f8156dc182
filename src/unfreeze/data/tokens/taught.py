"""Check that what the user wrote is what is taught.

After rendering, every word of a supervised turn must carry loss, and no word of another turn may.
Two checks, because either alone can be fooled:
  words    search the values themselves in the turn's supervised text, in the spellings that templates use
           (plain, JSON, Python, HTML). A short value ("4") can be there by chance.
  marks    once per shape of conversation, render every text of its stand-in with an invisible mark inside.
           Where the mark comes out is where that text went, however short the text is.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from markupsafe import escape

from unfreeze.core.errors import DataError
from unfreeze.data.rows.row import REASONING_NAMES, JsonObject, Message, Tool
from unfreeze.data.tokens.forms import reasoning_of

QUOTE_OPEN, QUOTE_CLOSE = "\U000f0000", "\U000f0001"
"""Private-use characters around special-token text that stands inside a message, so that it survives
rendering as plain text."""
EVERY_TURN = -1  # the turn of a segment that teaches a whole conversation
FIRST_MARK = 0x0F1000  # marks are the private-use characters from here on, one per text of a conversation
MARKS = 0x8000
HERE = chr(FIRST_MARK + MARKS)  # one more, which Marks does not use

_INVISIBLE = re.compile(f"[{QUOTE_OPEN}{QUOTE_CLOSE}{chr(FIRST_MARK)}-{chr(FIRST_MARK + MARKS)}]")

QUOTED = 80  # characters of a text in a message


@dataclass(frozen=True)
class Segment:
    """A stretch of rendered text that is tokenized on its own.

    `turn`: place of the message whose words it teaches; None: it carries no loss.
    """

    text: str
    turn: int | None = None

    @property
    def supervised(self) -> bool:
        return self.turn is not None


@dataclass(frozen=True)
class Word:
    """Something a row holds: the turn's place, the field, its value."""

    turn: int
    field: str
    value: object

    @property
    def where(self) -> str:
        return f"messages[{self.turn}].{self.field}"


def words_of(message: JsonObject, turn: int) -> Iterator[Word]:
    """List everything an assistant's turn says, without what is empty.

    The name and every argument of its tool calls, content, reasoning.
    """
    for i, call in enumerate(message.get("tool_calls") or ()):
        yield Word(turn, f"tool_calls[{i}].function.name", call["function"]["name"])
        yield from _leaves(call["function"]["arguments"], turn, f"tool_calls[{i}].function.arguments")
    if isinstance(message.get("content"), str) and message["content"].strip():
        yield Word(turn, "content", message["content"])
    if reasoning_of(message).strip():
        yield Word(turn, "reasoning_content", reasoning_of(message))


def _leaves(value: object, turn: int, field: str) -> Iterator[Word]:
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, object]", value).items():
            yield from _leaves(item, turn, f"{field}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(cast("Sequence[object]", value)):
            yield from _leaves(item, turn, f"{field}[{i}]")
    elif not isinstance(value, str) or value.strip():
        yield Word(turn, field, value)


def spellings(word: Word) -> list[str]:
    """List how a template may write a value.

    As it is; and in JSON (ASCII or not), Python or HTML where it is an argument of a call.
    """
    value = word.value.strip() if isinstance(word.value, str) else word.value
    if isinstance(value, str) and not word.field.startswith("tool_calls"):
        return [value]
    if isinstance(value, str):
        as_json = [json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
        # jinja2's |e, Python's, and that without quotes
        as_html = [str(escape(value)), html.escape(value), html.escape(value, quote=False)]
        return [value, *as_json, repr(value)[1:-1], *as_html]
    return [json.dumps(value), str(value)]


def missing(words: Sequence[Word], text: str) -> Word | None:
    """The first word that doesn't stand in `text`."""
    text = _unquoted(text)
    for word in words:
        if not any(_unquoted(spelling) in text for spelling in spellings(word)):
            return word
    return None


def _unquoted(text: str) -> str:
    """Without the quotes around special-token text, and without marks."""
    return text if text.isascii() else _INVISIBLE.sub("", text)


def check_words(
    messages: Sequence[JsonObject], taught: Sequence[int], samples: Sequence[Sequence[Segment]]
) -> None:
    """Check that every word of a supervised turn is taught.

    Raises DataError naming the turn and field whose words are not, what became of them, and what to do.
    """
    segments = [segment for sample in samples for segment in sample]
    for turn in taught:
        own = "\n".join(segment.text for segment in segments if segment.turn in (turn, EVERY_TURN))
        lost = missing(list(words_of(messages[turn], turn)), own)
        if lost is not None:
            raise _not_taught(lost, own, "\n".join(segment.text for segment in segments))


def refuse_missing(words: Sequence[Word], text: str, everything: str, *, own: str) -> None:
    """Raise DataError for the first word that is not in `text`.

    For the message: `everything` is the whole rendered conversation, which shows where the word went; `own`
    is the part that is taught.
    """
    lost = missing(words, text)
    if lost is not None:
        raise _not_taught(lost, own, everything)


def _not_taught(word: Word, own: str, everything: str) -> DataError:
    spelled = spellings(word)[0]
    own, everything = _unquoted(own), _unquoted(everything)
    if any(spelling in everything for spelling in spellings(word)):
        fate = "the chat template writes it where nothing is taught"
    elif len(kept := _longest_beginning(spelled, own)) >= min(12, len(spelled) // 2 + 1) and len(kept) < len(
        spelled
    ):
        fate = f"the chat template changes it behind {kept[-40:]!r}"
    else:
        fate = "the chat template leaves it out"
    said = (
        f"{word.where} ({spelled[:QUOTED]!r}) is not taught: {fate}; of this turn it teaches {own[:QUOTED]!r}"
    )
    return DataError(said, next=_remedy(word))


def _longest_beginning(text: str, within: str) -> str:
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[:middle] in within else (low, middle - 1)
    return text[:low]


def _remedy(word: Word) -> str:
    if word.field == "reasoning_content":
        return (
            "--data.reasoning inline writes it into the answer as <think>…</think>, --data.reasoning drop"
            " trains without it"
        )
    if word.field.startswith("tool_calls"):
        return (
            "this template has no form for it: remove the tool calls from the row, or use a release whose"
            " template takes them"
        )
    return "remove it from the row, or give the checkpoint a chat_template.jinja that writes it"


class Marks:
    """A conversation with an invisible mark inside each of its texts, and what each mark stands for."""

    def __init__(self, messages: Sequence[JsonObject]):
        self.words: dict[str, Word] = {}
        self.messages = [self._marked(message, turn) for turn, message in enumerate(messages)]

    def _marked(self, message: JsonObject, turn: int) -> Message:
        marked = dict(message)
        if isinstance(message.get("content"), str):
            marked["content"] = self._mark(message["content"], Word(turn, "content", message["content"]))
        # the same mark under each of its names: a template reads one of them
        if thought := reasoning_of(message):
            marked |= dict.fromkeys(
                message.keys() & set(REASONING_NAMES),
                self._mark(thought, Word(turn, "reasoning_content", thought)),
            )
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(call, turn, i) for i, call in enumerate(message["tool_calls"])]
        return marked

    def _call(self, call: JsonObject, turn: int, index: int) -> Tool:
        function = call["function"]
        where = f"tool_calls[{index}].function"
        name = function["name"]
        if name not in str(call.get("id")):  # Kimi's template writes the id, which holds the name
            name = self._mark(name, Word(turn, f"{where}.name", name))
        return {
            **call,
            "function": {
                **function,
                "name": name,
                "arguments": self._inside(function["arguments"], turn, f"{where}.arguments"),
            },
        }

    def _inside(self, value: object, turn: int, field: str) -> object:
        if isinstance(value, Mapping):
            fields = cast("Mapping[str, object]", value)
            return {key: self._inside(item, turn, f"{field}.{key}") for key, item in fields.items()}
        if isinstance(value, list | tuple):
            items = cast("Sequence[object]", value)
            return [self._inside(item, turn, f"{field}[{i}]") for i, item in enumerate(items)]
        return self._mark(value, Word(turn, field, value)) if isinstance(value, str) else value

    def _mark(self, text: str, word: Word) -> str:
        """Put the mark in the middle of the text, where no template trims.

        But never inside a tag a template looks for.
        """
        place = len(text) - len(text.lstrip()) + (len(text.strip()) + 1) // 2
        tag = text.rfind("<", 0, place)
        if tag >= 0 and (close := text.find(">", tag)) >= place:
            place = close + 1
        if not text.strip() or len(self.words) >= MARKS:
            return text
        mark = chr(FIRST_MARK + len(self.words))
        self.words[mark] = word
        return text[:place] + mark + text[place:]


def check_marks(
    marks: Marks,
    taught: Sequence[int],
    samples: Sequence[Sequence[Segment]],
    plain: Sequence[Sequence[Segment]],
) -> list[str]:
    """Check by marks; -> the roles of messages that the template leaves out altogether.

    If the marks changed what the template does, nothing is checked.
    Raises DataError if text of a supervised turn carries no loss or is missing, or text of another turn
    carries loss.
    """
    # the marks must change nothing but themselves, else they tell nothing
    without = str.maketrans(dict.fromkeys(marks.words))
    seen = [(segment.text.translate(without), segment.turn) for sample in samples for segment in sample]
    if seen != [(segment.text, segment.turn) for sample in plain for segment in sample]:
        return []
    segments = [segment for sample in samples for segment in sample]
    everything = "\n".join(segment.text for segment in segments)
    left_out: dict[str, None] = {}
    # where each mark came out: in its own turn if that is taught, in no taught text if it isn't
    for mark, word in marks.words.items():
        places = {segment.turn for segment in segments if mark in segment.text}
        if word.turn in taught and not places & {word.turn, EVERY_TURN}:
            own = "\n".join(segment.text for segment in segments if segment.turn in (word.turn, EVERY_TURN))
            raise _not_taught(word, own.translate(without), everything.translate(without) if places else "")
        if word.turn not in taught and places - {None, EVERY_TURN}:
            role = marks.messages[word.turn]["role"]
            raise DataError(
                f"{word.where} ({str(word.value)[:QUOTED]!r}) is the {role}'s and would be taught: the loss"
                " mask of the chat template covers it",
                next=(
                    "put the template's {% generation %} marks around the assistant's words only, or leave"
                    " them out (chat_template.jinja)"
                ),
            )
        if not places and word.field == "content":
            left_out[marks.messages[word.turn]["role"]] = None
    return list(left_out)
