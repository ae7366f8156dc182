"""Convert conversations to masked text: the examples of a row, and the text of each.

For the assistant's turn k, with the checkpoint's own template:
prompt      render(messages[:k], add_generation_prompt=True): what the model sees when it has to speak, token
            for token
rest        render(messages[:k + 1])[len(prompt):]: what the template writes after the prompt, if this
            rendering starts with the prompt
completion  the text to train on: rest, if it has every word of the turn; else another form (completions.py)

A row is one example (`whole`) if each prompt and its rest are unchanged in the rendering of the whole
conversation. It is one example per supervised turn (`each`) if the template rewrites earlier turns: Qwen3 and
others drop earlier reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from unfreeze.core.errors import DataError
from unfreeze.data.rows.messages import read_messages
from unfreeze.data.rows.row import Conversation, JsonObject, Message
from unfreeze.data.store.remarks import UNANSWERED
from unfreeze.data.tokens.completions import Completions, Tools, speaks_first
from unfreeze.data.tokens.forms import FORMS, Form, Prepared, Reasoning, as_template_reads, no_null_content
from unfreeze.data.tokens.releases import ThinkMarks
from unfreeze.data.tokens.stand_in import RowShape, shape_of, stand_in
from unfreeze.data.tokens.taught import (
    EVERY_TURN,
    Marks,
    Segment,
    Word,
    check_marks,
    check_words,
    missing,
    refuse_missing,
    words_of,
)
from unfreeze.data.tokens.templates import ChatTemplate, TemplateRefusal
from unfreeze.data.tokens.think import USUAL_MARKS, ThinkBlock, common_length, parting
from unfreeze.untrusted.json_object import is_object

Turns = Literal["auto", "whole", "each", "last"]
"""auto: whole if the template is stable, else each. whole: one example per row. each: one per supervised
turn.
last: only the last turn."""

MAX_SHAPES = 10_000
"""Number of conversation shapes to cache; any other is examined anew each time."""

V = TypeVar("V")
Sample = list[Segment]
Known = tuple[Form, list[str]]


@dataclass(frozen=True)
class Rendered:
    """A row's examples as text, and notes about the row (counted over rows)."""

    samples: list[Sample]
    notes: tuple[str, ...] = ()


class Unstable(DataError):
    """The template rewrites earlier turns when another is added."""


class Quote(Protocol):
    """Returns a copy of messages or tools with special-token text quoted."""

    def __call__(self, value: V, /) -> V: ...


class Renderer:
    """Renders conversations with one chat template and checks them word by word (taught.py).

    ends    the spellings of the tokens that end a turn
    quote   quotes the text of special tokens, so that a user who types `<|im_end|>` does not end a turn
    """

    def __init__(
        self,
        template: ChatTemplate,
        ends: Sequence[str],
        quote: Quote,
        *,
        turns: Turns = "auto",
        reasoning: Reasoning = "auto",
        supervise_all: bool = False,
    ):
        self.template, self.ends, self._quote = template, list(ends), quote
        self._completions = Completions(template, ends)
        self.turns: Turns = turns
        self.reasoning: Reasoning = reasoning
        self.supervise_all = supervise_all
        # shape -> the form that fits its stand-in, and what the template drops there; None: no form fits
        self._shapes: dict[RowShape, Known | None] = {}

    def __call__(self, row: Conversation) -> Rendered:
        """Render a row's conversation: its samples and its notes.

        Raises DataError if the template refuses the row, or if words of the row would carry no loss.
        """
        prepared = self._prepare(row.messages, row.tools)
        if (known := self._known(row)) is not None:
            form, left_out = known
            with suppress(DataError):  # the error for the row's own words is clearer
                return self._noted(prepared, left_out, self._samples(prepared, form, row), row)
        errors: list[DataError] = []
        for form in FORMS:
            try:
                samples = self._samples(prepared, form, row)
                return self._noted(prepared, self._look_closer(prepared, form, row, samples), samples, row)
            except DataError as error:
                errors.append(error)
        error = next(
            (error for error in errors if not isinstance(error, TemplateRefusal)),
            min(errors, key=_usefulness),
        )
        raise self._located(error, prepared) if isinstance(error, TemplateRefusal) else error

    def _known(self, row: Conversation) -> Known | None:
        """Return how the template treats rows of this shape, tested on their stand-in."""
        shape = shape_of(row)
        if shape in self._shapes:
            return self._shapes[shape]
        known: Known | None = None
        other = stand_in(row)
        for form in FORMS:
            try:
                prepared = self._prepare(other.messages, other.tools)
                samples = self._samples(prepared, form, other)
                known = form, self._look_closer(prepared, form, other, samples)
                break
            except DataError:
                continue
        if len(self._shapes) < MAX_SHAPES:
            self._shapes[shape] = known
        return known

    def _noted(
        self, prepared: Prepared, left_out: Sequence[str], samples: list[Sample], row: Conversation
    ) -> Rendered:
        return Rendered(samples, (*prepared.notes, *left_out, *self._notes(samples, row)))

    def _located(self, error: TemplateRefusal, prepared: Prepared) -> DataError:
        """Name the turn at which a template refuses a conversation.

        It is the last turn of the shortest prefix that is refused with the same message.
        """
        for count in range(1, len(prepared.messages) + 1):
            try:
                self.template.render(
                    self._quote(prepared.messages[:count]), tools=self._quote(prepared.tools)
                )
            except TemplateRefusal as refusal:
                if refusal.message == error.message:
                    turn = f"messages[{count - 1}] ({prepared.messages[count - 1]['role']})"
                    remedy = "change that turn, or give the checkpoint a chat_template.jinja that takes it"
                    return DataError(f"{error.message}; it does so from {turn} on", next=remedy)
        return error

    def prompt(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None = None) -> str:
        """Render a conversation up to where the assistant starts to speak.

        Raises DataError if the template refuses it.
        """
        prepared = self._prepare(read_messages(messages), tools)
        errors: list[DataError] = []
        for form in FORMS:
            try:
                messages, quoted_tools = self._quote(form(prepared.messages)), self._quote(prepared.tools)
                return self._completions.prompt(messages, quoted_tools)
            except DataError as error:
                errors.append(error)
        raise min(errors, key=_usefulness)

    def _taught(self, row: Conversation) -> list[int]:
        """Return the indices of the turns that carry loss."""
        return row.taught[-1:] if self.turns == "last" else row.taught

    def _prepare(self, messages: Sequence[Message], tools: Sequence[JsonObject] | None) -> Prepared:
        return as_template_reads(messages, tools, self.template.source, self.template.release, self.reasoning)

    def _samples(self, prepared: Prepared, form: Form, row: Conversation) -> list[Sample]:
        """Return a row's samples, in one form of its messages.

        Raises DataError if one of its words carries no loss.
        """
        messages, tools = self._quote(form(prepared.messages)), self._quote(prepared.tools)
        written = messages if prepared.written is None else self._quote(form(prepared.written))
        taught = self._taught(row)
        words = {turn: list(words_of(prepared.messages[turn], turn)) for turn in taught}
        # everything carries loss: one text, no mask
        if self.supervise_all:
            samples = [[Segment(self.template.render(messages, tools=tools), EVERY_TURN)]]
            check_words(prepared.messages, taught, samples)
            return samples
        # otherwise the ways in which the row may be cut, best first; take the first that covers every word
        ways: list[Callable[[], list[Sample]]] = []
        if self.turns in ("auto", "whole"):
            ways.append(lambda: [self._whole(written, tools, words)])
            if self.template.has_generation_marks:
                ways.append(lambda: [self._marked(messages, tools, words, in_prompts=False)])
        if self.turns != "whole":
            ways.append(
                lambda: [
                    self._one(written, messages[turn], tools, turn, words[turn], prepared.spelled.get(turn))
                    for turn in taught
                ]
            )
        if self.turns in ("auto", "whole") and self.template.has_generation_marks:
            ways.append(lambda: [self._marked(messages, tools, words, in_prompts=True)])
        # of several errors the most useful is raised (_usefulness); among equals the last
        errors: list[DataError] = []
        for way in ways:
            try:
                samples = way()
                check_words(prepared.messages, taught, samples)
                return samples
            except DataError as error:
                errors.append(error)
        raise min(reversed(errors), key=_usefulness)

    # -- one example for the whole row

    def _whole(self, messages: Sequence[Message], tools: Tools, words: Mapping[int, list[Word]]) -> Sample:
        """Cut the rendered conversation into context and the assistant's words. Raises Unstable."""
        full = self.template.render(messages, tools=tools)
        spans: list[tuple[int, int, int]] = []  # [start, end) in characters, turn
        for turn in words:
            prompt = self._completions.begin(messages, tools, turn)
            upto = (
                full if turn == len(messages) - 1 else self.template.render(messages[: turn + 1], tools=tools)
            )
            _refuse_unstable(prompt, upto, full, turn)
            if spans and len(prompt) < spans[-1][1]:
                raise Unstable(
                    f"the chat template is not prefix-stable: messages[{turn}] (assistant) begins inside the"
                    " turn before it"
                )
            answer = full[len(prompt) : len(upto)]
            if not self._completions.fits(prompt, answer):
                raise Unstable(
                    f"messages[{turn}] (assistant): the prompt opens a think block and the chat template does"
                    " not continue from there"
                )
            closed = self._completions.closed(answer, messages[turn], words[turn], tools)
            if turn == len(messages) - 1:
                full = prompt + closed + answer[len(closed) :]
            end = len(prompt) + len(closed if full.startswith(closed, len(prompt)) else answer)
            spans.append((len(prompt), end, turn))
        return _cut(full, spans)

    def _marked(
        self, messages: Sequence[Message], tools: Tools, words: Mapping[int, list[Word]], *, in_prompts: bool
    ) -> Sample:
        """Cut the conversation at {% generation %}.

        An end token right after a block belongs to it; otherwise the end would never be learned.
        in_prompts  False: raises Unstable if a block starts inside its turn's prompt, which the model only
                    reads
        """
        full, marked = self.template.render_spans(messages, tools)
        speakers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marked) != len(speakers):
            raise Unstable(
                f"the {{% generation %}} marks of the chat template made {len(marked)} spans for"
                f" {len(speakers)} assistant turns"
            )
        spans: list[tuple[int, int, int]] = []
        for (start, end), turn in zip(marked, speakers, strict=True):
            following = next((text for text in self.ends if full.startswith(text, end)), "")
            closed = (
                len(self._completions.closed(full[start:end], messages[turn], words.get(turn, []), tools))
                if not following
                else end + len(following) - start
            )
            spans.append((start, min(start + closed, len(full)), turn))
        spans = [span for span in spans if span[2] in words]
        if not in_prompts and any(
            parting(self._completions.begin(messages, tools, turn), full) > start for start, _, turn in spans
        ):
            raise Unstable("the {% generation %} marks of the chat template cover the end of its prompts")
        return _cut(full, spans)

    # -- one example for one turn

    def _one(
        self,
        messages: Sequence[Message],
        message: Message,
        tools: Tools,
        turn: int,
        words: list[Word],
        spelled: ThinkMarks | None,
    ) -> Sample:
        """Return the prompt of a turn and the model's completion.

        message   the turn, its reasoning under its own name
        spelled   the think marks that the row itself wrote into its content
        """
        # the prompt as the model will see it, and what the template writes after it
        prompt = self._completions.begin(messages, tools, turn)
        rest = self._completions.rest(messages[: turn + 1], tools, prompt)
        if rest is None and turn == 0:
            raise speaks_first()
        ways = (
            lambda: rest,
            lambda: self._completions.alone(message, tools, prompt),
            lambda: self._completions.composed(messages[:turn], message, tools, prompt, spelled),
        )
        # the first form that has every word of the turn and leaves no think block open
        for way in ways:
            completion = way()
            if (
                completion is not None
                and missing(words, completion) is None
                and self._completions.fits(prompt, completion)
            ):
                return [
                    Segment(prompt),
                    Segment(self._completions.closed(completion, message, words, tools), turn),
                ]
        # no form has them: name a word that the template drops, or else the place where it rewrites the
        # prompt
        if rest is None:
            upto = self.template.render(messages[: turn + 1], tools=tools)
            refuse_missing(words, upto, upto, own="")
            _refuse_unstable(
                prompt,
                upto,
                None,
                turn,
                remedy="give the checkpoint a chat_template.jinja that writes a turn as its prompt begins it",
            )
        return [Segment(prompt), Segment(rest or "", turn)]  # some words are missing; check_words names them

    # -- notes about a row

    def _look_closer(
        self, prepared: Prepared, form: Form, row: Conversation, samples: list[Sample]
    ) -> list[str]:
        """Check a row again with an invisible mark in each text.

        Returns notes on what the template leaves out of the prompt.
        """
        self._refuse_artifacts(prepared, form)
        marks = Marks(prepared.messages)
        try:
            marked = self._samples(replace(prepared, messages=marks.messages), form, row)
        except DataError:  # the template reacts to the marks; it writes the words, which must suffice
            return []
        roles = check_marks(marks, self._taught(row), marked, samples)
        notes = [f"the {role}'s words are left out by this chat template" for role in roles]
        names = [
            name
            for tool in row.tools or ()
            if is_object(function := tool.get("function")) and isinstance(name := function.get("name"), str)
        ]
        if names and names[0] not in samples[0][0].text:
            notes.append("tools are left out by this chat template")
        return notes

    def _refuse_artifacts(self, prepared: Prepared, form: Form) -> None:
        """Raise DataError if the template writes text that no message contains.

        It may write None for a turn that only calls tools, or a list of contents as Python or JSON prints it.
        """
        formed, plain = form(prepared.messages), no_null_content(prepared.messages)
        if formed == plain:
            return
        tools = self._quote(prepared.tools)
        written = self.template.render(self._quote(formed), tools=tools)
        for texts, without in (
            (("None", "null", "none"), no_null_content(formed)),
            (("'type': 'text'", '"type": "text"'), plain),
        ):
            try:  # the same form without the suspect parts; an argument may contain a null of its own
                usual = self.template.render(self._quote(without), tools=tools)
            except TemplateRefusal:
                usual = ""
            for text in texts:
                if written.count(text) > usual.count(text):
                    raise DataError(
                        f"the chat template writes {text} where a turn has no content, or has a list of it"
                    )

    def _closes_thinking(self, sample: Sample) -> bool:
        """Return True if an example opens a think block after a prompt that closed it."""
        marks = self._completions.marks or USUAL_MARKS
        return (
            len(sample) == 2
            and sample[1].text.startswith(marks.opening)
            and ThinkBlock(marks).state(sample[0].text) == "closed"
        )

    def _notes(self, samples: list[Sample], row: Conversation) -> list[str]:
        notes: list[str] = []
        if len(samples) > 1 and self.turns == "auto":
            notes.append("one example per assistant turn, because the chat template rewrites earlier turns")
        supervised = [segment.text for sample in samples for segment in sample if segment.supervised]
        if not self.supervise_all and not all(text.endswith(tuple(self.ends)) for text in supervised):
            notes.append("the answer does not end with an end token, so the model does not learn to stop")
        if not self.supervise_all and row.messages[-1]["role"] != "assistant":
            notes.append(UNANSWERED)
        if any(self._closes_thinking(sample) for sample in samples):
            closing = (self._completions.marks or USUAL_MARKS).closing.strip()
            switch = next(
                (
                    name
                    for name in ("enable_thinking", "thinking")
                    if re.search(rf"(?<![\"'.\w]){name}\b", self.template.source)
                ),
                "",
            )
            other = f"; --data.template-variables {switch}=true selects the other prompt" if switch else ""
            notes.append(f"reasoning is trained on after a prompt that ends in {closing}{other}")
        return notes


def _usefulness(error: DataError) -> int:
    """Return the rank of an error among several; the lowest is raised.

    0: a word without loss; 1: the template's own message; 2: earlier turns are rewritten; 3: the template
    failed.
    """
    if isinstance(error, TemplateRefusal):
        return 1 if error.in_its_words else 3
    return 2 if isinstance(error, Unstable) else 0


def _refuse_unstable(
    prompt: str,
    upto: str,
    full: str | None,
    turn: int,
    *,
    remedy: str = "--data.turns each makes one example per assistant turn",
) -> None:
    """Raise Unstable if a text does not start with the one before it, and show where they diverge."""
    for shorter, longer, what in (
        (prompt, upto, "the prompt before it"),
        (upto, full, "the conversation up to it"),
    ):
        if longer is None or longer.startswith(shorter):
            continue
        at = common_length(shorter, longer)
        raise Unstable(
            f"the chat template is not prefix-stable: messages[{turn}] (assistant), {what} changes at"
            f" character {at}: {shorter[at : at + 60]!r} became {longer[at : at + 60]!r}",
            next=remedy,
        )


def _cut(full: str, spans: Sequence[tuple[int, int, int]]) -> Sample:
    """Cut a text at [start, end) of each turn."""
    result: Sample = []
    at = 0
    for start, end, turn in spans:
        result += [Segment(full[at:start]), Segment(full[start:end], turn)]
        at = end
    return [segment for segment in [*result, Segment(full[at:])] if segment.text]
