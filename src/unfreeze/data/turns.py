"""Conversations to text with a mask: which examples a row becomes, and what stands in them.

For the assistant's turn k, with the checkpoint's own template:
  prompt      render(messages[:k], add_generation_prompt=True)     what the model sees when it has to speak, token for token
  rest        render(messages[:k + 1])[len(prompt):]               what the template writes from there on, if that begins with the prompt
  completion  rest, where every word of the turn stands in it; else composed: reasoning between the release's think marks, then the template's
              own writing of content and tool calls, then the end token
A row is one example (`whole`) where each prompt and its rest stand unchanged in the rendering of the whole conversation, and one example per
supervised turn (`each`) where the template rewrites what was said before: Qwen3 and others drop earlier reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from unfreeze.core.errors import DataError
from unfreeze.data.forms import FORMS, Form, Prepared, Reasoning, no_null_content, prepare, reasoning_of
from unfreeze.data.releases import ThinkMarks
from unfreeze.data.sources import REASONING_NAMES, Conversation, Message, read_messages
from unfreeze.data.taught import EVERY_TURN, QUOTE_OPEN, Marks, Segment, check_marks, check_words, missing, refuse_missing, words_of
from unfreeze.data.templates import ChatTemplate, TemplateRefusal

Turns = Literal["auto", "whole", "each", "last"]
"""auto: whole where the template is stable, else each. whole: one example per row. each: one per supervised turn. last: the last turn's only."""

MAX_SHAPES = 10_000  # of conversations, remembered; a further one is looked at again each time it comes

Sample = list[Segment]

_EMPTY_BLOCK = re.compile(r"\s*(?:<think>\s*)?</think>\s*")
_USUAL_MARKS = ThinkMarks("<think>\n", "\n</think>\n\n")  # for a release that is not known, and opens a block in its prompt
_ASKED: list[Message] = [{"role": "user", "content": "?"}]


@dataclass(frozen=True)
class Rendered:
    """A row's examples as text, and what is worth saying of the row (counted over rows)."""

    samples: list[Sample]
    notes: tuple[str, ...] = ()


class Unstable(DataError):
    """The template rewrites what was said before when a turn is added."""


class Renderer:
    """Conversations as one chat template renders them, checked word by word (taught.py).

    ends    the spellings of the tokens that end a turn
    quote   messages or tools -> the same with special-token text quoted, so that a user who types `<|im_end|>` ends nobody's turn
    """

    def __init__(
        self,
        template: ChatTemplate,
        ends: Sequence[str],
        quote: Callable[[Any], Any],
        *,
        turns: Turns = "auto",
        reasoning: Reasoning = "auto",
        supervise_all: bool = False,
    ):
        self.template, self.ends, self._quote = template, list(ends), quote
        longest_first = sorted(map(re.escape, ends), key=len, reverse=True)
        self._end = re.compile(f"(?<!{QUOTE_OPEN})(?:{'|'.join(longest_first)})") if ends else None
        self.turns: Turns = turns
        self.reasoning: Reasoning = reasoning
        self.supervise_all = supervise_all
        self._known: dict[tuple[Any, ...], tuple[Form, list[str]]] = {}  # shape -> the form that fits it, and what the template leaves out

    def __call__(self, row: Conversation) -> Rendered:
        """Raises DataError where the template refuses the row, or where what the user wrote would not be what is taught."""
        prepared = self._prepare(row.messages, row.tools)
        shape = _shape(row)
        known = self._known.get(shape)
        errors: list[DataError] = []
        for form in [known[0], *FORMS] if known else FORMS:
            try:
                samples = self._samples(prepared, form, row)
                if known is None or form is not known[0]:
                    known = (form, self._look_closer(prepared, form, row, samples))
                    if len(self._known) < MAX_SHAPES:
                        self._known[shape] = known
            except DataError as error:
                errors.append(error)
                continue
            return Rendered(samples, (*prepared.notes, *known[1], *self._notes(samples, row)))
        raise next((error for error in errors if not isinstance(error, TemplateRefusal)), min(reversed(errors), key=_usefulness))

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text of a conversation up to where the assistant begins to speak. Raises DataError where the template refuses it."""
        prepared = self._prepare(read_messages(messages), tools)
        errors: list[DataError] = []
        for form in FORMS:
            try:
                return self._prompt(self._quote(form(prepared.messages)), self._quote(prepared.tools))
            except DataError as error:
                errors.append(error)
        raise min(errors, key=_usefulness)

    def _taught(self, row: Conversation) -> list[int]:
        """Places of the turns that carry loss."""
        return row.taught[-1:] if self.turns == "last" else row.taught

    def _prepare(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> Prepared:
        return prepare(messages, tools, self.template.source, self.template.release, self.reasoning)

    def _prompt(self, messages: Sequence[Message], tools: Any) -> str:
        return self.template.render(messages, add_generation_prompt=True, tools=tools)

    def _samples(self, prepared: Prepared, form: Form, row: Conversation) -> list[Sample]:
        """What the row becomes, in one form of its messages. Raises DataError where a word of it is not taught."""
        messages, tools = self._quote(form(prepared.messages)), self._quote(prepared.tools)
        taught = self._taught(row)
        words = {turn: list(words_of(prepared.messages[turn], turn)) for turn in taught}
        if self.supervise_all:
            samples = [[Segment(self.template.render(messages, tools=tools), EVERY_TURN)]]
            check_words(prepared.messages, taught, samples)
            return samples
        whole: DataError | None = None
        if self.turns in ("auto", "whole"):
            try:
                sample = self._whole(messages, tools, words)
                check_words(prepared.messages, taught, [sample])
                return [sample]
            except DataError as error:
                if self.turns == "whole":
                    raise
                whole = error
        try:
            samples = [self._one(messages, tools, turn, words[turn]) for turn in taught]
            check_words(prepared.messages, taught, samples)
            return samples
        except DataError as error:
            raise min((error, whole or error), key=_usefulness) from None

    # -- one example of the whole row ---------------------------------------------------------------------------------------------------

    def _whole(self, messages: Sequence[Message], tools: Any, words: Mapping[int, list[Any]]) -> Sample:
        """The rendered conversation, cut into what is given and what the assistant says. Raises Unstable."""
        full = self.template.render(messages, tools=tools)
        spans: list[tuple[int, int, int]] = []  # [start, end) in characters, turn
        try:
            for turn in words:
                prompt = self._begin(messages, tools, turn)
                upto = full if turn == len(messages) - 1 else self.template.render(messages[: turn + 1], tools=tools)
                _refuse_unstable(prompt, upto, full, turn)
                if spans and len(prompt) < spans[-1][1]:
                    raise Unstable(f"the chat template is not prefix-stable: messages[{turn}] (assistant) begins inside the turn before it")
                said = full[len(prompt) : len(upto)]
                closed = self._closed(said, messages[turn], words[turn])
                if turn == len(messages) - 1:
                    full = prompt + closed + said[len(closed) :]
                end = len(prompt) + len(closed if full.startswith(closed, len(prompt)) else said)
                spans.append((len(prompt), end, turn))
        except DataError:
            if not self.template.has_generation_marks:
                raise
            full, spans = self._marked(messages, tools, words)
        return _cut(full, spans)

    def _marked(self, messages: Sequence[Message], tools: Any, words: Mapping[int, Any]) -> tuple[str, list[tuple[int, int, int]]]:
        """Spans from {% generation %}; an end token that stands right behind a block belongs to it, or the end would never be learned."""
        full, marked = self.template.render_spans(messages, tools)
        speakers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marked) != len(speakers):
            raise DataError(f"the {{% generation %}} marks of the chat template made {len(marked)} spans for {len(speakers)} turns of the assistant")
        spans = []
        for (start, end), turn in zip(marked, speakers, strict=True):
            following = next((text for text in self.ends if full.startswith(text, end)), "")
            closed = len(self._closed(full[start:end], messages[turn], words.get(turn, []))) if not following else end + len(following) - start
            spans.append((start, min(start + closed, len(full)), turn))
        return full, [span for span in spans if span[2] in words]

    # -- one example of one turn --------------------------------------------------------------------------------------------------------

    def _one(self, messages: Sequence[Message], tools: Any, turn: int, words: list[Any]) -> Sample:
        """The prompt of a turn and what the model says there."""
        prompt = self._begin(messages, tools, turn)
        rest = self._rest(messages[: turn + 1], tools, prompt)
        if rest is None and turn == 0:
            raise _speaks_first()
        for said in (rest, self._alone(messages[turn], tools, prompt), self._composed(messages, tools, turn, prompt)):
            if said is not None and missing(words, said) is None:
                return [Segment(prompt), Segment(self._closed(said, messages[turn], words), turn)]
        if rest is None:
            upto = self.template.render(messages[: turn + 1], tools=tools)
            refuse_missing(words, upto, upto, own="")
            _refuse_unstable(prompt, upto, None, turn)
        return [Segment(prompt), Segment(rest or "", turn)]  # without some words; check_words names them

    def _begin(self, messages: Sequence[Message], tools: Any, turn: int) -> str:
        """The prompt of a turn."""
        try:
            return self._prompt(messages[:turn], tools)
        except TemplateRefusal:
            if turn:
                raise
            raise _speaks_first() from None

    def _rest(self, messages: Sequence[Message], tools: Any, prompt: str) -> str | None:
        """What the template writes behind a prompt, or None where it rewrites the prompt."""
        upto = self.template.render(messages, tools=tools)
        return upto[len(prompt) :] if upto.startswith(prompt) else None

    def _alone(self, message: Message, tools: Any, prompt: str) -> str | None:
        """What the template writes of a turn behind a plain question, where it rewrites the turn's own past (gpt-oss, behind a tool's return)."""
        try:
            asked = self._prompt(_ASKED, tools)
            rest = self._rest([*_ASKED, message], tools, asked)
        except TemplateRefusal:
            return None
        opening = self._marks.opening
        return rest if _overlap(asked, opening) == _overlap(prompt, opening) else None

    @property
    def _marks(self) -> ThinkMarks:
        return self.template.release.think or _USUAL_MARKS

    def _composed(self, messages: Sequence[Message], tools: Any, turn: int, prompt: str) -> str | None:
        """Reasoning between the release's marks, then content and tool calls as the template writes them. None where there is no such form."""
        marks = self._marks
        opened = _overlap(prompt, marks.opening)
        thought = reasoning_of(messages[turn])
        if thought and self.template.release.think is None and opened < len(marks.opening.rstrip()):
            return None
        body = self._body(messages[:turn], messages[turn], tools, marks)
        if body is None:
            return None
        in_block = opened >= len(marks.opening.rstrip())
        if thought or in_block:
            block = _EMPTY_BLOCK.match(body)
            body = body[block.end() :] if block else body
        if not thought:
            return marks.closing + body if in_block else body
        thought = thought.strip("\n") if marks.opening.endswith("\n") else thought
        return marks.opening[opened:] + thought + marks.closing + body

    def _body(self, before: Sequence[Message], message: Message, tools: Any, marks: ThinkMarks) -> str | None:
        """What the template writes of a turn without its reasoning, behind its own prompt or, where that is rewritten, behind a plain question."""
        plain = {name: value for name, value in message.items() if name not in REASONING_NAMES}
        for context in (before, _ASKED):
            try:
                prompt = self._prompt(context, tools)
                upto = self.template.render([*context, plain], tools=tools)
            except TemplateRefusal:
                continue
            stem = prompt[: len(prompt) - _overlap(prompt, marks.opening)]
            if upto.startswith(stem):
                return upto[len(prompt if upto.startswith(prompt) else stem) :]
        return None

    def _closed(self, said: str, message: Message, words: list[Any]) -> str:
        """A turn up to its end token: the first one behind all its words. Where the template writes none, the release's is put there."""
        for found in self._end.finditer(said) if self._end else ():
            if missing(words, said[: found.end()]) is None:
                return said[: found.end()]
        release = self.template.release
        end = release.call_end if message.get("tool_calls") else release.turn_end
        return said.rstrip() + end if end in self.ends else said

    # -- what is said of a row ----------------------------------------------------------------------------------------------------------

    def _look_closer(self, prepared: Prepared, form: Form, row: Conversation, samples: list[Sample]) -> list[str]:
        """The look by marks, once per shape of conversation. -> notes on what the template leaves out of the prompt."""
        self._refuse_artifacts(prepared, form)
        marks = Marks(prepared.messages)
        try:
            marked = self._samples(replace(prepared, messages=marks.messages), form, row)
        except DataError:  # a template that reacts to the marks: the words were found, and that has to do
            return []
        roles = check_marks(marks, self._taught(row), marked, samples)
        notes = [f"the {role}'s words are left out by this chat template" for role in roles]
        names = [name for tool in row.tools or () if isinstance(name := (tool.get("function") or {}).get("name"), str)]
        if names and names[0] not in samples[0][0].text:
            notes.append("tools are left out by this chat template")
        return notes

    def _refuse_artifacts(self, prepared: Prepared, form: Form) -> None:
        """Raises DataError where the template writes what nobody said: None for a turn that only calls tools, a list as Python or JSON has it."""
        given, plain = form(prepared.messages), no_null_content(prepared.messages)
        if given == plain:
            return
        tools = self._quote(prepared.tools)
        written = self.template.render(self._quote(given), tools=tools)
        try:
            usual = self.template.render(self._quote(plain), tools=tools)
        except TemplateRefusal:
            usual = ""
        for text in ("None", "null", "none", "'type': 'text'", '"type": "text"'):
            if written.count(text) > usual.count(text):
                raise DataError(f"the chat template writes {text} where a turn has no content, or has a list of it")

    def _notes(self, samples: list[Sample], row: Conversation) -> list[str]:
        notes = []
        if len(samples) > 1 and self.turns == "auto":
            notes.append("one example per turn of the assistant, as the chat template rewrites earlier turns")
        said = [segment.text for sample in samples for segment in sample if segment.supervised]
        if not self.supervise_all and not all(text.endswith(tuple(self.ends)) for text in said):
            notes.append("the answer does not close with an end token: the end is not learned")
        if any(reasoning_of(row.messages[turn]) for turn in row.taught) and any(_closes_thinking(sample) for sample in samples):
            switch = "enable_thinking" if "enable_thinking" in self.template.source else "thinking"
            notes.append(f"reasoning is taught behind a prompt that ends in </think>; --template-variables {switch}=true asks for the other prompt")
        return notes


def _usefulness(error: DataError) -> int:
    """A word that is not taught says most; then what the template itself says, how it rewrites, and last what went wrong inside it."""
    if isinstance(error, TemplateRefusal):
        return 1 if error.in_its_words else 3
    return 2 if isinstance(error, Unstable) else 0


def _speaks_first() -> DataError:
    said = "the assistant speaks first and this template has no prompt for that"
    return DataError(said, next="begin with a user or system message")


def _closes_thinking(sample: Sample) -> bool:
    return len(sample) == 2 and sample[0].text.rstrip().endswith("</think>") and "<think>" in sample[1].text


def _overlap(text: str, opening: str) -> int:
    """Characters of `opening` that `text` already ends with."""
    return next((n for n in range(len(opening), 0, -1) if text.endswith(opening[:n])), 0)


def _shape(row: Conversation) -> tuple[Any, ...]:
    """What a template may decide by, without the words."""

    def of(message: Message) -> tuple[Any, ...]:
        calls = tuple(tuple(sorted(call["function"]["arguments"])) for call in message.get("tool_calls") or ())
        content = message.get("content")
        return (message["role"], type(content), bool(content), bool(message.get("reasoning_content")), calls, tuple(message))

    return (*map(of, row.messages), bool(row.tools), row.context)


def _refuse_unstable(prompt: str, upto: str, full: str | None, turn: int) -> None:
    """Raises Unstable where a text does not begin with the one before it, showing where they part."""
    for shorter, longer, what in ((prompt, upto, "the prompt before it"), (upto, full, "the conversation up to it")):
        if longer is None or longer.startswith(shorter):
            continue
        at = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), min(len(shorter), len(longer)))
        raise Unstable(
            f"the chat template is not prefix-stable: messages[{turn}] (assistant), {what} changes at character {at}: "
            f"{shorter[at : at + 60]!r} became {longer[at : at + 60]!r}",
            next="--turns each makes one example per turn of the assistant",
        )


def _cut(full: str, spans: Sequence[tuple[int, int, int]]) -> Sample:
    """A text cut at [start, end) of each turn."""
    result: Sample = []
    at = 0
    for start, end, turn in spans:
        result += [Segment(full[at:start]), Segment(full[start:end], turn)]
        at = end
    return [segment for segment in [*result, Segment(full[at:])] if segment.text]
