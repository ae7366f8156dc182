"""What a chat template writes of a conversation, as a function of the texts in it.

Most templates put a message's content between words of their own and never look at it. So a template is run
once for each shape of conversation (roles and fields), with texts that know where they stand. What comes out
is a Trace: literal words, and holes for texts. The next conversation of that shape is a join of strings, some
4 us instead of 100.

A text may be written, joined with +, stripped, and asked a question (`'</think>' in content`). The answer to
a question belongs to the trace: it holds for conversations that answer alike. Anything else that a template
does with a text raises Looked, and conversations of that shape are rendered each time. So a trace is right
for every text, by construction and not by trial; it is compared all the same with the rendering that it was
made beside.
"""

from __future__ import annotations

import operator
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.runtime
import jinja2.utils
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from unfreeze.data.rows.row import JsonObject
from unfreeze.untrusted.template_limits import LimitedEnvironment

MOST_TRACES = 20_000
"""Of a template: more shapes than these are rendered each time."""
MOST_ANSWERS = 8
"""Traces of one shape, one for each set of answers to the template's questions."""
MOST_TEXT = 1_000_000
"""Characters of a conversation that a trace is used for."""
MOST_WORK = 20_000_000
"""Of characters times messages: what a template that gathers all it has written at each message may cost. The
sandbox refuses some 10 times as much: whether a row is refused never hangs on the rows before it."""
_TOKEN = secrets.token_hex(8)
_OPEN, _CLOSE = f"\U000f0005{_TOKEN}", "\U000f0006"
_HOLE = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
"""A text while a template is traced. Drawn anew in each process: no template can hold it."""

_FILTERS = frozenset(
    "trim default d length count select reject selectattr rejectattr map list first last string"
    " _counted _joined _asked".split()
)
"""These ask a text for nothing but what Text answers. Another filter that is given a text ends the trace."""
_TESTS = frozenset(
    "defined undefined none string mapping sequence iterable boolean number integer float true false".split()
)
"""These ask for the type only."""
_LOCALS = ("_loop_vars", "_block_vars")
"""What jinja2 itself gives to each call: the names of the loop or block that it stands in."""
_REFUSED = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.AssignBlock,
    nodes.FilterBlock,
    nodes.EvalContextModifier,
    nodes.ScopedEvalContextModifier,
)
"""Their texts would be made unseen; the last two are {% autoescape %}."""

Shape = tuple[Any, ...]


class Looked(Exception):
    """The template asked a text for what a trace cannot hold."""


@dataclass(frozen=True)
class Hole:
    """A message's field, with the methods that strip it applied in order."""

    message: int
    field: str
    strips: tuple[tuple[Callable[..., str], str | None], ...] = ()

    def of(self, messages: Sequence[JsonObject]) -> str:
        """The text that comes here."""
        text = messages[self.message][self.field]
        for strip, characters in self.strips:
            text = strip(text, characters)
        return text


Parts = Sequence[str | Hole]
"""Of a text: words of the template at even places, holes between them."""


class Question(NamedTuple):
    """Something that was asked of a text, and the answer."""

    hole: Hole
    ask: Callable[[Any, Any], bool]
    about: Any
    answer: bool

    def holds(self, messages: Sequence[JsonObject]) -> bool:
        """Whether these messages answer alike."""
        return self.ask(self.hole.of(messages), self.about) == self.answer


class Trace:
    """A template's text for one shape of conversation, with holes. Right where all questions hold.

    parts: None where the template, after these questions, looked into a text.
    """

    def __init__(self, parts: Parts | None, questions: Sequence[Question]):
        self.parts = parts
        self.questions = list(dict.fromkeys(questions))
        self._words = [part if isinstance(part, str) else "" for part in parts or ()]
        self._holes = [
            (place, part.message, part.field, part.strips)
            for place, part in enumerate(parts or ())
            if isinstance(part, Hole)
        ]

    def text(self, messages: Sequence[JsonObject]) -> str | None:
        """The conversation as the template writes it; None where it has to be asked."""
        if self.parts is None:
            return None
        made = self._words.copy()
        for place, message, field, strips in self._holes:
            text = messages[message][field]
            for strip, characters in strips:
                text = strip(text, characters)
            made[place] = text
        return "".join(made)

    def holds(self, messages: Sequence[JsonObject]) -> bool:
        """Whether it is the text of these messages."""
        return all(question.holds(messages) for question in self.questions)


def shape_of(message: JsonObject) -> Shape | None:
    """All of a message but its texts: its fields in order, the role, which are null. None: it is not traced.

    It is not where a field holds anything else: parts of content, calls of tools.
    """
    shape: list[object] = [message.get("role")]
    for name, value in message.items():
        if type(value) is not str and value is not None:
            return None
        shape.append((name, value is None))
    return tuple(shape)


class _Conversation:
    """The texts of one rendering, and what was asked of them."""

    def __init__(self) -> None:
        self.texts: list[_Text] = []  # that have a hole of their own
        self.questions: list[Question] = []

    def messages(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Copies whose texts are traced. The role stays what it is: it is of the shape."""
        return [
            {
                name: _Text.at(self, Hole(place, name), value)
                if type(value) is str and name != "role"
                else value
                for name, value in message.items()
            }
            for place, message in enumerate(messages)
        ]

    def parts(self, text: str) -> Parts:
        """Rendered text as words and holes."""
        pieces = _HOLE.split(text)
        if any(_TOKEN in words for words in pieces[::2]):
            raise Looked
        holes = [text._hole for text in self.texts]
        return [holes[int(piece)] or "" if place % 2 else piece for place, piece in enumerate(pieces)]


def _looks(*_: object, **__: object) -> NoReturn:
    raise Looked


class _Text(str):
    """A text of a conversation, or words joined with such texts (`_hole` is None).

    As a str it is its marks, so that what is written can be taken apart again. Every method of str that is
    not defined here raises Looked.
    """

    _conversation: _Conversation
    _hole: Hole | None
    _value: str

    @classmethod
    def at(cls, conversation: _Conversation, hole: Hole, value: str) -> _Text:
        text = cls(f"{_OPEN}{len(conversation.texts)}{_CLOSE}")
        conversation.texts.append(text)
        text._conversation, text._hole, text._value = conversation, hole, value
        return text

    @classmethod
    def joined(cls, conversation: _Conversation, marked: str) -> _Text:
        text = cls(marked)
        text._conversation, text._hole, text._value = conversation, None, ""
        return text

    def _stripped(self, strip: Callable[..., str], characters: object) -> _Text:
        if self._hole is None or type(characters) not in (str, type(None)):
            raise Looked
        strips = (*self._hole.strips, (strip, characters))
        return _Text.at(
            self._conversation, replace(self._hole, strips=strips), strip(self._value, characters)
        )

    def _asked(
        self, ask: Callable[[Any, Any], bool], about: object, start: Any = None, end: Any = None
    ) -> bool:
        if self._hole is None or type(about) not in (str, type(None)) or (start, end) != (None, None):
            raise Looked
        answer = ask(self._value, about)
        self._conversation.questions.append(Question(self._hole, ask, about, answer))
        return answer

    def strip(self, characters: str | None = None, /) -> _Text:
        return self._stripped(str.strip, characters)

    def lstrip(self, characters: str | None = None, /) -> _Text:
        return self._stripped(str.lstrip, characters)

    def rstrip(self, characters: str | None = None, /) -> _Text:
        return self._stripped(str.rstrip, characters)

    def startswith(self, prefix: str | tuple[str, ...], start: Any = None, end: Any = None, /) -> bool:
        return self._asked(str.startswith, prefix, start, end)

    def endswith(self, suffix: str | tuple[str, ...], start: Any = None, end: Any = None, /) -> bool:
        return self._asked(str.endswith, suffix, start, end)

    def __contains__(self, part: str, /) -> bool:
        return self._asked(operator.contains, part)

    def __bool__(self) -> bool:
        return self._asked(_says, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._asked(operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        raise Looked


def _says(text: str, _: object) -> bool:
    return bool(text)


_KEPT = frozenset(
    "__new__ __init__ __class__ __doc__ __getattribute__ __getattr__ __setattr__ __delattr__ __dir__"
    " __init_subclass__ __subclasshook__ __sizeof__ __reduce__ __reduce_ex__ __getstate__".split()
)
for _name in set(dir(str)) - _KEPT - set(vars(_Text)):
    setattr(_Text, _name, _looks)


def _holds(value: object) -> bool:
    """Whether a text is in it, at any depth."""
    if isinstance(value, Mapping):
        return any(map(_holds, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds, value))
    return isinstance(value, _Text)


def _kept_from(function: Any) -> Any:
    """A filter or test that must not be given a text."""

    def kept(*args: Any, **named: Any) -> Any:
        whole = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
        if _holds(whole) or _holds(named):
            raise Looked
        return function(*whole, **named)

    if hasattr(function, "jinja_pass_arg"):
        kept.jinja_pass_arg = function.jinja_pass_arg
    return kept


class TracingEnvironment(LimitedEnvironment):
    """The sandbox for templates that are traced: what would take a text apart unseen raises Looked."""

    conversation: _Conversation

    def keep_texts(self) -> None:
        """Put a guard on every filter and test; called when all are registered."""
        self.filters["_asked"] = _not_a_text
        for name, function in self.filters.items():
            if name not in _FILTERS:
                self.filters[name] = _kept_from(function)
        for name, function in self.tests.items():
            if name not in _TESTS:
                self.tests[name] = _kept_from(function)

    def _sealed(self, made: Any) -> Any:
        """What a macro wrote, as a text where it holds one."""
        if type(made) is not str or _TOKEN not in made:
            return made
        alone = _HOLE.fullmatch(made)
        return self.conversation.texts[int(alone[1])] if alone else _Text.joined(self.conversation, made)

    def joined(self, items: list[Any]) -> str:
        if not _holds(items):
            return super().joined(items)
        return self._sealed("".join(map(str, items)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if not isinstance(left, _Text) and not isinstance(right, _Text):
            return super().call_binop(context, operator, left, right)
        # a text that is marked as safe escapes what it is joined with
        if operator != "+" or any(type(side) not in (str, _Text) for side in (left, right)):
            raise Looked
        return self._sealed("".join((left, right)))

    def call(self, context: Any, obj: Any, *args: Any, **named: Any) -> Any:
        takes = isinstance(obj, jinja2.runtime.Macro) or obj is jinja2.utils.Namespace
        own = isinstance(getattr(obj, "__self__", None), _Text)
        given = [value for name, value in named.items() if name not in _LOCALS]
        if not takes and not own and (_holds(args) or _holds(given)):
            raise Looked
        return self._sealed(super().call(context, obj, *args, **named))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, _Text):
            raise Looked
        return super().getitem(obj, argument)

    def _measure(self, *values: Any) -> None:
        super()._measure(*(value for value in values if not isinstance(value, _Text)))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Watched().visit(super()._parse(source, name, filename))


def _not_a_text(value: Any) -> Any:
    if isinstance(value, _Text):
        raise Looked
    return value


class _Watched(NodeTransformer):
    """`x in y` -> `(x | _asked) in y`: a str that is asked for a text in it would answer by its marks.

    So too where x stands within a chain, `w == x in y`.
    """

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        before: nodes.Compare | nodes.Operand = node
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                before.expr = nodes.Filter(before.expr, "_asked", [], [], None, None, lineno=node.lineno)
            before = operand
        return node


class Traces:
    """The traces of one template.

    Raises jinja2's errors where the template cannot be compiled.
    """

    def __init__(self, environment: TracingEnvironment, source: str):
        environment.keep_texts()
        tree = environment.parse(source)
        changes = any(node.name == "random" for node in tree.find_all(nodes.Filter)) or any(
            node.name == "lipsum" for node in tree.find_all(nodes.Name)
        )
        self._template = None if changes or any(tree.find_all(_REFUSED)) else environment.from_string(tree)
        self._environment = environment
        self._traces: dict[Shape, list[Trace]] = {}
        self._last: tuple[Sequence[JsonObject], Shape] = ((), ())

    def text(
        self,
        messages: Sequence[JsonObject],
        settings: tuple[object, ...],
        given: Callable[[], dict[str, Any]],
        rendered: Callable[[], str],
    ) -> str | None:
        """The conversation as text, from a trace; None where there is none.

        settings   what else the text depends on: with a prompt or not, the time it tells
        given      the variables that the template reads
        rendered   renders it, to compare a new trace with
        """
        if self._template is None or (shape := self._shape(messages)) is None:
            return None
        key = (*settings, *shape)
        known = self._traces.get(key, [])
        if trace := next((trace for trace in known if trace.holds(messages)), None):
            return trace.text(messages)
        if len(known) >= MOST_ANSWERS or len(self._traces) >= MOST_TRACES:
            return None
        text = rendered()
        trace = self._traced(messages, given())
        if trace.text(messages) not in (None, text):
            trace = Trace(None, ())  # which nothing known leads to: this shape is rendered each time
        self._traces.setdefault(key, []).append(trace)
        return text

    def trace(self, messages: Sequence[JsonObject], settings: tuple[object, ...]) -> Trace | None:
        """The trace that `text` has used for these messages, if any."""
        shape = self._shape(messages)
        known = () if shape is None else self._traces.get((*settings, *shape), ())
        return next((trace for trace in known if trace.parts is not None and trace.holds(messages)), None)

    def _shape(self, messages: Sequence[JsonObject]) -> Shape | None:
        """Of each message; those of a conversation serve all its beginnings."""
        last, shapes = self._last
        if len(messages) > len(last) or not all(map(operator.is_, messages, last)):
            found = [*map(shape_of, messages)]
            shapes = tuple(found) if None not in found and is_short(messages) else (None,)
            self._last = (list(messages), shapes)
        return None if shapes == (None,) else shapes[: len(messages)]

    def _traced(self, messages: Sequence[JsonObject], given: Mapping[str, Any]) -> Trace:
        """What the template does with texts of this shape."""
        assert self._template is not None
        environment = self._environment
        environment.conversation = conversation = _Conversation()
        environment.begin()
        try:
            text = environment.rendered(
                self._template, {**environment.globals, **given, "messages": conversation.messages(messages)}
            )
            return Trace(conversation.parts(text), conversation.questions)
        except (Looked, jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return Trace(None, conversation.questions)


def is_short(messages: Sequence[JsonObject]) -> bool:
    """Whether a rendering of these messages is sure to stay within the sandbox's limits."""
    length = sum(len(value) for message in messages for value in message.values() if type(value) is str)
    return length <= MOST_TEXT and length * len(messages) <= MOST_WORK
