"""Chat templates: the checkpoint's own jinja2 text, rendered in a sandbox as transformers renders it.

Environment: ImmutableSandboxedEnvironment with a limit on steps (template_limits.py),
trim_blocks, lstrip_blocks, loop controls, {% generation %}, `raise_exception`,
`strftime_now`, `tojson` without HTML escaping. Equal to transformers' rendering in
tests/data/tokens/test_templates.py.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

from unfreeze.core.errors import CheckpointError, DataError
from unfreeze.data.rows.row import JsonObject
from unfreeze.data.tokens.releases import release_of
from unfreeze.data.tokens.stepwise import MARK, Pieces, marked, pieces
from unfreeze.untrusted.template_limits import LimitedEnvironment

PLAIN_TEMPLATE = (
    "{%- if add_bos %}{{ bos_token }}{% endif -%}{%- for message in messages -%}{%- if message.tool_calls or"
    " tools %}{{ raise_exception('the plain template has no form for tools') }}{% endif -%}{%- set content ="
    " message.content if message.content is string else message.content | map(attribute='text') | join -%}{{-"
    " message.role | capitalize + ':\\n' -}}{%- if message.reasoning_content %}{{ '<think>\\n' +"
    " message.reasoning_content + '\\n</think>\\n' }}{% endif -%}{{- content -}}{%- if message.role =="
    " 'assistant' %}{{ eos_token }}{% endif -%}{{- '\\n\\n' -}}{%- endfor -%}{%- if add_generation_prompt"
    " %}{{ 'Assistant:\\n' }}{% endif -%}"
)
"""For a checkpoint without a template: `User:⏎question⏎⏎Assistant:⏎answer</s>`. Turns are named in plain
words, because a base model has no tokens for them. The end token closes an answer, so that the model learns
to stop (docs/why/trust.md N6)."""

SPAN_OPEN, SPAN_CLOSE = "\U000f0002", "\U000f0003"
"""Private-use characters around the text of {% generation %} blocks while spans are extracted."""

_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions a template can raise on messages it was not written for."""


class TemplateRefusal(DataError):
    """The template cannot render these messages.

    Either its own raise_exception said so (`in_its_words`), or something in it failed.
    """

    in_its_words = False


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: the assistant's words.

    Leaves the text unchanged unless its environment requests marks.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        opening, closing = getattr(self.environment, "generation_marks", ("", ""))
        return f"{opening}{caller()}{closing}"


class _Dict:
    """`dict` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **fields: object) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


E = TypeVar("E", bound=LimitedEnvironment)


class _MarkingEnvironment(LimitedEnvironment):
    generation_marks = (SPAN_OPEN, SPAN_CLOSE)


def _environment(kind: type[E]) -> E:
    environment = kind(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, dict=_Dict())
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


class _Last(NamedTuple):
    """The last rendered conversation, in pieces."""

    messages: list[JsonObject]
    tools: Sequence[JsonObject] | None
    pieces: Pieces

    def begins_with(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None) -> bool:
        """Return True if it starts with these very messages (same objects, which are never modified)."""
        return (
            tools is self.tools
            and len(messages) <= len(self.messages)
            and all(map(operator.is_, messages, self.messages))
        )


class ChatTemplate:
    """A compiled chat template.

        variables  what templates may read besides the messages: bos_token, eos_token, …; thinking or
                   enable_thinking if a user sets them
        now        the time that `strftime_now` returns; None: the clock's. A run keeps the time of its first
                   start, so that its data does not change
        release    facts about the release this template belongs to
        file       where the text comes from, for messages

    Raises CheckpointError if the text is not a valid template.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, object],
        tool_source: str | None = None,
        file: str = "the chat template",
        *,
        now: datetime | None = None,
    ):
        self.source = source
        self.variables = dict(variables)
        self.now = now
        self.release = release_of(source)
        self.has_generation_marks = "endgeneration" in source
        try:
            self._plain = _environment(LimitedEnvironment).from_string(source)
            self._marked = _environment(_MarkingEnvironment).from_string(source)
            tools = tool_source and _environment(LimitedEnvironment).from_string(tool_source)
            self._for_tools = tools or None
            steps = _environment(LimitedEnvironment)
            stepwise = marked(steps.parse(source))
            self._steps = None if stepwise is None else steps.from_string(stepwise.tree)
            self._least = 0 if stepwise is None else stepwise.least
            self._formats = [formats_of(source), formats_of(tool_source or "")]
        except (jinja2.TemplateError, RecursionError, OverflowError, ValueError, UnicodeError) as error:
            raise _broken(error, file) from None

        self._last: _Last | None = None
        self._prompt: str | None = None  # what a stepwise template writes after the messages as a prompt

    def _strftime(self, form: str) -> str:
        return (self.now or datetime.now()).strftime(form)

    def told(self) -> str | None:
        """Return every date text the template may render today; "" for none.

        None if that is unknown, because it prints more than the day from the clock.
        """
        now = self.now or datetime.now()
        times: list[tuple[str, str]] = []
        for formats in self._formats:
            if formats is None or (self.now is None and not all(map(_DAY.fullmatch, formats))):
                return None if self.now is None else repr(self.now)
            times += [(form, now.strftime(form)) for form in formats]
        return repr(sorted(times)) if times else ""

    def render(
        self,
        messages: Sequence[JsonObject],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[JsonObject] | None = None,
    ) -> str:
        """Render the conversation. With `add_generation_prompt` it ends where the assistant starts to speak.

        Raises TemplateRefusal if the template refuses the messages (including by its own `raise_exception`).
        """
        if tools and self._for_tools is not None:
            return self._run(self._for_tools, messages, add_generation_prompt, tools)
        if self._steps is None or len(messages) < self._least:
            return self._run(self._plain, messages, add_generation_prompt, tools)
        # a prefix of the last rendered conversation, or else the conversation with all its prefixes
        last = self._last
        if last is None or not last.begins_with(messages, tools):
            if add_generation_prompt:
                return self._run(self._plain, messages, add_generation_prompt, tools)
            text = self._run(self._steps, messages, False, tools)
            if (cut := pieces(text, len(messages))) is None:
                return text.replace(MARK, "")
            self._last = last = _Last(list(messages), tools, cut)
        upto = last.pieces.upto(len(messages))
        if upto is None:
            return self._run(self._plain, messages, add_generation_prompt, tools)
        if not add_generation_prompt:
            return upto + last.pieces.behind
        if self._prompt is None:
            self._prompt = self._run(self._steps, messages, True, tools).rpartition(MARK)[2]
        return upto + self._prompt

    def render_spans(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render; return the text and the [start, end) character ranges of the {% generation %} blocks."""
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        length = 0
        for i, piece in enumerate(self._run(self._marked, messages, False, tools).split(SPAN_OPEN)):
            inside, closed, outside = piece.partition(SPAN_CLOSE)
            if i and closed:
                spans.append((length, length + len(inside)))
            parts += [inside, outside]
            length += len(inside) + len(outside)
        return "".join(parts), spans

    def _run(
        self,
        template: jinja2.Template,
        messages: Sequence[JsonObject],
        add_generation_prompt: bool,
        tools: Sequence[JsonObject] | None,
    ) -> str:
        assert isinstance(template.environment, LimitedEnvironment)
        template.environment.begin()
        variables = self._given(messages, add_generation_prompt, tools)
        try:
            return template.environment.rendered(template, {**template.environment.globals, **variables})
        except _RENDER_ERRORS as error:
            refusal = TemplateRefusal(
                f"the chat template refuses these messages: {error or type(error).__name__}"
            )
            refusal.in_its_words = type(error) is jinja2.TemplateError
            raise refusal from None

    def _given(
        self, messages: Sequence[JsonObject], add_generation_prompt: bool, tools: Sequence[JsonObject] | None
    ) -> dict[str, Any]:
        """Return the variables that a template reads."""
        return {
            "strftime_now": self._strftime,
            **self.variables,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }


def _broken(error: Exception, file: str) -> CheckpointError:
    """Return the error for a template that cannot be compiled, with the line if jinja2 names one."""
    syntax = isinstance(error, jinja2.TemplateSyntaxError)
    why = (error.message if syntax else str(error)) or type(error).__name__
    return CheckpointError(
        f"{file}{f', line {error.lineno}' if syntax else ''}: the template cannot be compiled: {why}",
        next=f"correct {'that line' if syntax else 'it'}, or download the file again",
    )


_DAY = re.compile(r"(?:[^%]|%-?[aAbBdeFjmuwxyYCDhgGUVW%])*")
"""A strftime format that shows at most the day."""


def formats_of(source: str) -> set[str] | None:
    """Return the strftime formats that a template uses; None if they are not literals."""
    if "strftime_now" not in source:
        return set()
    tree = _environment(LimitedEnvironment).parse(source)
    calls = [
        call
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Name) and call.node.name == "strftime_now"
    ]
    known = {id(call.node) for call in calls} | {id(test.node) for test in tree.find_all(nodes.Test)}
    forms = [call.args[0] for call in calls if len(call.args) == 1 and not call.kwargs]
    if len(forms) < len(calls) or any(
        name.name == "strftime_now" and id(name) not in known for name in tree.find_all(nodes.Name)
    ):
        return None
    texts = {form.value for form in forms if isinstance(form, nodes.Const) and isinstance(form.value, str)}
    return texts if len(texts) == len({getattr(form, "value", None) for form in forms}) else None


def plain_template(variables: Mapping[str, object], *, add_bos: bool) -> ChatTemplate:
    """Return PLAIN_TEMPLATE with the tokenizer's own end (and start) token."""
    return ChatTemplate(PLAIN_TEMPLATE, {**variables, "add_bos": add_bos})
