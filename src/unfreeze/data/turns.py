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
from functools import cached_property
from typing import Any, Literal

from unfreeze.core.errors import DataError
from unfreeze.data.forms import FORMS, Form, Prepared, Reasoning, no_null_content, prepare, reasoning_of
from unfreeze.data.releases import ThinkMarks
from unfreeze.data.sources import REASONING_NAMES, Conversation, Message, read_messages
from unfreeze.data.taught import EVERY_TURN, HERE, QUOTE_OPEN, Marks, Segment, check_marks, check_words, missing, refuse_missing, words_of
from unfreeze.data.templates import ChatTemplate, TemplateRefusal

Turns = Literal["auto", "whole", "each", "last"]
"""auto: whole where the template is stable, else each. whole: one example per row. each: one per supervised turn. last: the last turn's only."""

MAX_SHAPES = 10_000  # of conversations, remembered; a further one is looked at again each time it comes

MAX_TAG = 40  # characters of a tag such as <|START_OF_TURN_TOKEN|>

Sample = list[Segment]

_USUAL_MARKS = ThinkMarks("<think>\n", "\n</think>\n\n")  # for a release that is not known, and opens a block in its prompt
_ASKED: list[Message] = [{"role": "user", "content": "?"}]
_TAG_AT_END = re.compile(r"(?:<[^<>\s]+>\s*)?\Z")
_SAID, _WHY = "said-so", "for-this-reason"  # the words of a turn that is rendered to see what a template puts around them


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
        error = next((error for error in errors if not isinstance(error, TemplateRefusal)), min(errors, key=_usefulness))
        raise self._located(error, prepared) if isinstance(error, TemplateRefusal) else error

    def _located(self, error: TemplateRefusal, prepared: Prepared) -> DataError:
        """A template's refusal with the turn at which it comes: the conversation up to there, and no shorter one, is refused in these words."""
        for count in range(1, len(prepared.messages) + 1):
            try:
                self.template.render(self._quote(prepared.messages[:count]), tools=self._quote(prepared.tools))
            except TemplateRefusal as refusal:
                if refusal.message == error.message:
                    turn = f"messages[{count - 1}] ({prepared.messages[count - 1]['role']})"
                    remedy = "change that turn, or give the checkpoint a chat_template.jinja that takes it"
                    return DataError(f"{error.message}; it does so from {turn} on", next=remedy)
        return error

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
        written = messages if prepared.written is None else self._quote(form(prepared.written))
        taught = self._taught(row)
        words = {turn: list(words_of(prepared.messages[turn], turn)) for turn in taught}
        if self.supervise_all:
            samples = [[Segment(self.template.render(messages, tools=tools), EVERY_TURN)]]
            check_words(prepared.messages, taught, samples)
            return samples
        ways: list[Callable[[], list[Sample]]] = []
        if self.turns in ("auto", "whole"):
            ways.append(lambda: [self._whole(written, tools, words)])
            if self.template.has_generation_marks:
                ways.append(lambda: [self._marked(messages, tools, words, in_prompts=False)])
        if self.turns != "whole":
            ways.append(lambda: [self._one(written, messages[turn], tools, turn, words[turn], prepared.spelled.get(turn)) for turn in taught])
        if self.turns in ("auto", "whole") and self.template.has_generation_marks:
            ways.append(lambda: [self._marked(messages, tools, words, in_prompts=True)])
        errors: list[DataError] = []
        for way in ways:
            try:
                samples = way()
                check_words(prepared.messages, taught, samples)
                return samples
            except DataError as error:
                errors.append(error)
        raise min(reversed(errors), key=_usefulness)

    # -- one example of the whole row ---------------------------------------------------------------------------------------------------

    def _whole(self, messages: Sequence[Message], tools: Any, words: Mapping[int, list[Any]]) -> Sample:
        """The rendered conversation, cut into what is given and what the assistant says. Raises Unstable."""
        full = self.template.render(messages, tools=tools)
        spans: list[tuple[int, int, int]] = []  # [start, end) in characters, turn
        for turn in words:
            prompt = self._begin(messages, tools, turn)
            upto = full if turn == len(messages) - 1 else self.template.render(messages[: turn + 1], tools=tools)
            _refuse_unstable(prompt, upto, full, turn)
            if spans and len(prompt) < spans[-1][1]:
                raise Unstable(f"the chat template is not prefix-stable: messages[{turn}] (assistant) begins inside the turn before it")
            said = full[len(prompt) : len(upto)]
            if not self._fits(prompt, said):
                raise Unstable(f"messages[{turn}] (assistant): the prompt opens a think block and the chat template does not go on from there")
            closed = self._closed(said, messages[turn], words[turn], tools)
            if turn == len(messages) - 1:
                full = prompt + closed + said[len(closed) :]
            end = len(prompt) + len(closed if full.startswith(closed, len(prompt)) else said)
            spans.append((len(prompt), end, turn))
        return _cut(full, spans)

    def _marked(self, messages: Sequence[Message], tools: Any, words: Mapping[int, Any], *, in_prompts: bool) -> Sample:
        """The conversation cut at {% generation %}. An end token that stands right behind a block belongs to it, or the end would never be
        learned. `in_prompts` false: raises Unstable where a block begins inside its turn's prompt, which nobody has to say."""
        full, marked = self.template.render_spans(messages, tools)
        speakers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marked) != len(speakers):
            raise Unstable(f"the {{% generation %}} marks of the chat template made {len(marked)} spans for {len(speakers)} turns of the assistant")
        spans = []
        for (start, end), turn in zip(marked, speakers, strict=True):
            following = next((text for text in self.ends if full.startswith(text, end)), "")
            closed = len(self._closed(full[start:end], messages[turn], words.get(turn, []), tools)) if not following else end + len(following) - start
            spans.append((start, min(start + closed, len(full)), turn))
        spans = [span for span in spans if span[2] in words]
        if not in_prompts and any(_parting(self._begin(messages, tools, turn), full) > start for start, _, turn in spans):
            raise Unstable("the {% generation %} marks of the chat template cover the end of its prompts")
        return _cut(full, spans)

    # -- one example of one turn --------------------------------------------------------------------------------------------------------

    def _one(
        self, messages: Sequence[Message], message: Message, tools: Any, turn: int, words: list[Any], spelled: ThinkMarks | None
    ) -> Sample:
        """The prompt of a turn and what the model says there. `message`: the turn, its reasoning under a name of its own; `spelled`: the think
        marks that the row itself wrote into its content."""
        prompt = self._begin(messages, tools, turn)
        rest = self._rest(messages[: turn + 1], tools, prompt)
        if rest is None and turn == 0:
            raise _speaks_first()
        ways = (
            lambda: rest,
            lambda: self._alone(message, tools, prompt),
            lambda: self._composed(messages[:turn], message, tools, prompt, spelled),
        )
        for way in ways:
            said = way()
            if said is not None and missing(words, said) is None and self._fits(prompt, said):
                return [Segment(prompt), Segment(self._closed(said, message, words, tools), turn)]
        if rest is None:
            upto = self.template.render(messages[: turn + 1], tools=tools)
            refuse_missing(words, upto, upto, own="")
            _refuse_unstable(prompt, upto, None, turn, remedy="give the checkpoint a chat_template.jinja that writes a turn as its prompt begins it")
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
        block = _Block(self._marks or _USUAL_MARKS)
        return rest if block.state(asked) == block.state(prompt) else None

    def _fits(self, prompt: str, said: str) -> bool:
        """Not where the prompt opens a think block that nothing closes (an answer would be learned as a thought), or that is opened again."""
        marks = self._marks or _USUAL_MARKS
        opening, closing = marks.opening.strip(), marks.closing.strip()
        return _Block(marks).state(prompt) != "open" or (closing in said and not said.lstrip().startswith(opening))

    @cached_property
    def _marks(self) -> ThinkMarks | None:
        """Around reasoning: as the template writes them, else as its release's model does; None where neither is known."""
        return self._written_marks() or self.template.release.think

    def _written_marks(self) -> ThinkMarks | None:
        """What this template puts before and behind the reasoning of an answer to a plain question. None where it writes no reasoning there.

        between prompt and reasoning: the opening. Between reasoning and content: the closing, and what stands before content anyway.
        """
        answer = {"role": "assistant", "content": _SAID}
        turns = (answer, answer | {"reasoning_content": _WHY})
        both = [prepare([*_ASKED, turn], None, self.template.source, self.template.release) for turn in turns]
        for form in (FORMS[0], FORMS[-1]):
            try:
                prompt = self._prompt(form(_ASKED), None)
                plain, full = (self.template.render(form(prepared.messages)) for prepared in both)
            except TemplateRefusal:
                continue
            if full.count(_WHY) != 1 or full.count(_SAID) != 1 or plain.count(_SAID) != 1 or full.index(_SAID) < full.index(_WHY):
                continue
            begin = min(_parting(prompt, full), _parting(plain, full))
            opening, between = full[begin : full.index(_WHY)], full[full.index(_WHY) + len(_WHY) : full.index(_SAID)]
            anyway = plain[begin : plain.index(_SAID)]
            closing = between.removesuffix(anyway)
            closing = closing if closing.strip() else between  # the answer without reasoning begins with the closing mark
            if not opening.strip() and anyway.strip().startswith(closing.strip()):  # both write a block, and part inside it
                opening = "".join(_TAG_AT_END.findall(full[:begin]))
            if opening.strip() and closing.strip():
                return ThinkMarks(opening, closing)
        return None

    def _composed(
        self, before: Sequence[Message], message: Message, tools: Any, prompt: str, spelled: ThinkMarks | None
    ) -> str | None:
        """Reasoning between the release's marks, then content and tool calls as the template writes them. None where there is no such form."""
        known = self._marks or spelled
        marks = known or _USUAL_MARKS
        block = _Block(marks)
        state = block.state(prompt)
        thought = reasoning_of(message)
        if thought and known is None and state != "open":
            return None
        body = self._body(before, message, tools, block)
        if body is None:
            return None
        if not thought:
            return {"": body, "open": marks.closing + block.cut(body), "closed": block.cut(body)}[state]
        thought = thought.strip("\n") if marks.opening.endswith("\n") else thought
        opened = _overlap(prompt, marks.opening) if state != "open" else _overlap(prompt, marks.opening) or len(marks.opening)
        space = marks.closing[len(marks.closing.rstrip()) :]
        return marks.opening[opened:] + thought + marks.closing + block.cut(body).removeprefix(space)

    def _body(self, before: Sequence[Message], message: Message, tools: Any, block: _Block) -> str | None:
        """What the template writes of a turn without its reasoning, behind its own prompt or, where that is rewritten, behind a plain question.

        A prompt may end in something that the template does not write of a turn that was said: white space, or a think block, opened or empty.
        """
        for context in (before, _ASKED):
            try:
                prompt = self._prompt(context, tools)
                upto = self.template.render([*context, _without_reasoning(message)], tools=tools)
            except TemplateRefusal:
                continue
            at = len(prompt) if upto.startswith(prompt) else _parting(prompt, upto)
            extra = prompt[at:]
            if block.is_end(extra):
                return upto[at:].lstrip() if extra and not extra.strip() else upto[at:]
            if behind := _behind_but_for_space(prompt, upto):
                return upto[behind:].lstrip()
            if (said := self._behind_last_words(context, message, tools)) is not None:
                return said
        return None

    def _behind_last_words(self, context: Sequence[Message], message: Message, tools: Any) -> str | None:
        """What the template writes of a turn, found by what stands between the last message and it, wherever the texts part before.

        Some templates write what belongs to the last question (a system prompt, a hint) only while it is the last.
        """
        last = context[-1]
        if not isinstance(last.get("content"), str):
            return None
        marked = [*context[:-1], {**last, "content": last["content"].rstrip() + HERE}]
        prompt = self._prompt(marked, tools).partition(HERE)[2]
        upto = self.template.render([*marked, _without_reasoning(message)], tools=tools).partition(HERE)[2]
        return upto[len(prompt) :] if prompt and upto.startswith(prompt) else None

    def _closed(self, said: str, message: Message, words: list[Any], tools: Any) -> str:
        """A turn up to its end token: the first one behind all its words. Where the template writes none there, the one it writes before the
        next turn is put there, or the release's."""
        for found in self._end.finditer(said) if self._end else ():
            if missing(words, said[: found.end()]) is None:
                return said[: found.end()]
        release = self.template.release
        end = release.call_end if message.get("tool_calls") else release.turn_end
        return said.rstrip() + end if end in self.ends else said + self._end_before_next(message, tools)

    def _end_before_next(self, message: Message, tools: Any) -> str:
        """The end token that the template writes behind a turn only when another one follows; "" for none."""
        message = _without_reasoning(message)
        calls = message.get("tool_calls") or ()
        returns = [{"role": "tool", "tool_call_id": call.get("id"), "name": call["function"]["name"], "content": "?"} for call in calls]
        try:
            upto = self.template.render([*_ASKED, message], tools=tools)
            further = self.template.render([*_ASKED, message, *(returns or _ASKED)], tools=tools)
        except TemplateRefusal:
            return ""
        behind = further[len(upto) :] if further.startswith(upto) else ""
        found = self._end.search(behind) if self._end else None
        return behind[: found.end()] if found and not behind[: found.start()].strip() else ""

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
        for texts, without in ((("None", "null", "none"), no_null_content(given)), (("'type': 'text'", '"type": "text"'), plain)):
            try:  # the same form without what may have gone wrong: an argument may hold a null of its own
                usual = self.template.render(self._quote(without), tools=tools)
            except TemplateRefusal:
                usual = ""
            for text in texts:
                if written.count(text) > usual.count(text):
                    raise DataError(f"the chat template writes {text} where a turn has no content, or has a list of it")

    def _closes_thinking(self, sample: Sample) -> bool:
        """Whether an example opens a think block behind a prompt that closed it."""
        marks = self._marks or _USUAL_MARKS
        return len(sample) == 2 and sample[1].text.startswith(marks.opening) and _Block(marks).state(sample[0].text) == "closed"

    def _notes(self, samples: list[Sample], row: Conversation) -> list[str]:
        notes = []
        if len(samples) > 1 and self.turns == "auto":
            notes.append("one example per turn of the assistant, as the chat template rewrites earlier turns")
        said = [segment.text for sample in samples for segment in sample if segment.supervised]
        if not self.supervise_all and not all(text.endswith(tuple(self.ends)) for text in said):
            notes.append("the answer does not close with an end token: the end is not learned")
        if any(self._closes_thinking(sample) for sample in samples):
            closing = (self._marks or _USUAL_MARKS).closing.strip()
            switch = next((name for name in ("enable_thinking", "thinking") if re.search(rf"(?<![\"'.\w]){name}\b", self.template.source)), "")
            other = f"; --template-variables {switch}=true asks for the other prompt" if switch else ""
            notes.append(f"reasoning is taught behind a prompt that ends in {closing}{other}")
        return notes


def _usefulness(error: DataError) -> int:
    """A word that is not taught says most; then what the template itself says, how it rewrites, and last what went wrong inside it."""
    if isinstance(error, TemplateRefusal):
        return 1 if error.in_its_words else 3
    return 2 if isinstance(error, Unstable) else 0


def _speaks_first() -> DataError:
    said = "the assistant speaks first and this template has no prompt for that"
    return DataError(said, next="begin with a user or system message")


def _overlap(text: str, opening: str) -> int:
    """Characters of `opening` that `text` already ends with."""
    return next((n for n in range(len(opening), 0, -1) if text.endswith(opening[:n])), 0)


def _common(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _parting(a: str, b: str) -> int:
    """Where two texts part, taken back to the beginning of a tag that they part within (`<think>`, `</think>`: before the `<`)."""
    at = _common(a, b)
    opened = max(a.rfind("<", 0, at), a.rfind("[", 0, at))
    inside = opened >= 0 and at - opened < MAX_TAG and not re.search(r"[>\]\s]", a[opened:at])
    return opened if inside else at


def _without_reasoning(message: Message) -> Message:
    """A turn without its reasoning, and without the speaker's name, which no prompt has (Kimi writes it into the header)."""
    return {name: value for name, value in message.items() if name not in (*REASONING_NAMES, "name")}


def _behind_but_for_space(prompt: str, upto: str) -> int:
    """Where a text goes on behind a prompt that it begins with but for white space (a template with line breaks in the wrong place); else 0."""
    at = 0
    for char in prompt:
        if not char.isspace():
            while at < len(upto) and upto[at].isspace():
                at += 1
            if not upto.startswith(char, at):
                return 0
            at += 1
    return at


class _Block:
    """A think block at the end of a prompt, or at the beginning of what follows."""

    def __init__(self, marks: ThinkMarks):
        opening, closing = re.escape(marks.opening.strip()), re.escape(marks.closing.strip())
        alone = "?" if marks.closing.strip().startswith("</") else ""  # </think> says by itself what it closes, <|end|> does not
        self._at_end = re.compile(rf"(?:(?P<open>{opening}\s*){alone}(?P<close>{closing}\s*)|(?P<opened>{opening}\s*))?\Z")
        self._at_start = re.compile(rf"\s*(?:{opening}\s*)?{closing}\s*")

    def state(self, prompt: str) -> Literal["", "open", "closed"]:
        """Whether a prompt ends within a think block ("open"), behind one ("closed"), or in neither."""
        found = self._at_end.search(prompt)
        return "closed" if found and found["close"] else "open" if found and found["opened"] else ""

    def is_end(self, text: str) -> bool:
        """Whether a text is nothing but white space and a think block, opened or empty."""
        return self._at_end.fullmatch(text.strip()) is not None

    def cut(self, body: str) -> str:
        """What stands behind an empty block, or behind the end of one."""
        block = self._at_start.match(body)
        return body[block.end() :] if block else body


def _shape(row: Conversation) -> tuple[Any, ...]:
    """What a template may decide by, without the words."""

    def of(message: Message) -> tuple[Any, ...]:
        calls = tuple(tuple(sorted(call["function"]["arguments"])) for call in message.get("tool_calls") or ())
        content = message.get("content")
        return (message["role"], type(content), bool(content), bool(message.get("reasoning_content")), calls, tuple(message))

    return (*map(of, row.messages), bool(row.tools), row.context)


def _refuse_unstable(
    prompt: str, upto: str, full: str | None, turn: int, *, remedy: str = "--turns each makes one example per turn of the assistant"
) -> None:
    """Raises Unstable where a text does not begin with the one before it, showing where they part."""
    for shorter, longer, what in ((prompt, upto, "the prompt before it"), (upto, full, "the conversation up to it")):
        if longer is None or longer.startswith(shorter):
            continue
        at = _common(shorter, longer)
        raise Unstable(
            f"the chat template is not prefix-stable: messages[{turn}] (assistant), {what} changes at character {at}: "
            f"{shorter[at : at + 60]!r} became {longer[at : at + 60]!r}",
            next=remedy,
        )


def _cut(full: str, spans: Sequence[tuple[int, int, int]]) -> Sample:
    """A text cut at [start, end) of each turn."""
    result: Sample = []
    at = 0
    for start, end, turn in spans:
        result += [Segment(full[at:start]), Segment(full[start:end], turn)]
        at = end
    return [segment for segment in [*result, Segment(full[at:])] if segment.text]
