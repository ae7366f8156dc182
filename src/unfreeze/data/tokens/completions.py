"""The assistant's completion after a prompt, as the chat template writes it.

Three forms are tried:
rest      what the template writes after the prompt, if its rendering starts with the prompt
alone     what it writes for the turn after a plain question
composed  reasoning between the release's think marks, then content and tool calls as the template writes
          them, then the end token
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from unfreeze.core.errors import DataError
from unfreeze.data.rows.row import REASONING_NAMES, JsonObject, Message
from unfreeze.data.tokens.forms import reasoning_of
from unfreeze.data.tokens.releases import ThinkMarks
from unfreeze.data.tokens.taught import HERE, QUOTE_OPEN, Word, missing
from unfreeze.data.tokens.templates import ChatTemplate, TemplateRefusal
from unfreeze.data.tokens.think import ASKED, USUAL_MARKS, ThinkBlock, overlap, parting, written_marks

Tools = Sequence[JsonObject] | None


class Completions:
    """Completions of one chat template. ends: the spellings of the tokens that end a turn."""

    def __init__(self, template: ChatTemplate, ends: Sequence[str]):
        self.template, self.ends = template, list(ends)
        longest_first = sorted(map(re.escape, ends), key=len, reverse=True)
        self._end = re.compile(f"(?<!{QUOTE_OPEN})(?:{'|'.join(longest_first)})") if ends else None

    @cached_property
    def marks(self) -> ThinkMarks | None:
        """Marks around reasoning: those the template writes, else those of the release's model.

        None if neither is known.
        """
        return written_marks(self.template) or self.template.release.think

    @cached_property
    def _block(self) -> ThinkBlock:
        return ThinkBlock(self.marks or USUAL_MARKS)

    def prompt(self, messages: Sequence[Message], tools: Tools) -> str:
        """Render the conversation up to where the assistant starts to speak."""
        return self.template.render(messages, add_generation_prompt=True, tools=tools)

    def begin(self, messages: Sequence[Message], tools: Tools, turn: int) -> str:
        """Render the prompt of a turn."""
        try:
            return self.prompt(messages[:turn], tools)
        except TemplateRefusal:
            if turn:
                raise
            raise speaks_first() from None

    def rest(self, messages: Sequence[Message], tools: Tools, prompt: str) -> str | None:
        """Return the text that the template writes after a prompt, or None if it rewrites the prompt."""
        upto = self.template.render(messages, tools=tools)
        return upto[len(prompt) :] if upto.startswith(prompt) else None

    def alone(self, message: Message, tools: Tools, prompt: str) -> str | None:
        """Render a turn after a plain question, for templates that rewrite earlier parts of the turn.

        gpt-oss does so after a tool's result.
        """
        try:
            question = self.prompt(ASKED, tools)
            rest = self.rest([*ASKED, message], tools, question)
        except TemplateRefusal:
            return None
        block = self._block
        return rest if block.state(question) == block.state(prompt) else None

    def fits(self, prompt: str, answer: str) -> bool:
        """Return True if `answer` can be trained on as the completion of `prompt`.

        It cannot if the prompt opens a think block that the answer does not close (the answer would be
        learned as a thought) or opens again.
        """
        marks = self.marks or USUAL_MARKS
        opening, closing = marks.opening.strip(), marks.closing.strip()
        return self._block.state(prompt) != "open" or (
            closing in answer and not answer.lstrip().startswith(opening)
        )

    def composed(
        self,
        before: Sequence[Message],
        message: Message,
        tools: Tools,
        prompt: str,
        spelled: ThinkMarks | None,
    ) -> str | None:
        """Put reasoning between the release's marks, then content and tool calls as the template writes them.

        Return None if there is no such form.
        """
        known = self.marks or spelled
        marks = known or USUAL_MARKS
        block = ThinkBlock(marks)
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
        opened = (
            overlap(prompt, marks.opening)
            if state != "open"
            else overlap(prompt, marks.opening) or len(marks.opening)
        )
        space = marks.closing[len(marks.closing.rstrip()) :]
        return marks.opening[opened:] + thought + marks.closing + block.cut(body).removeprefix(space)

    def _body(
        self, before: Sequence[Message], message: Message, tools: Tools, block: ThinkBlock
    ) -> str | None:
        """Render a turn without its reasoning.

        It follows its own prompt or, if that is rewritten, a plain question.
        A prompt may end in something the template does not write for a finished turn: white space, or an open
        or empty think block.
        """
        for context in (before, ASKED):
            try:
                prompt = self.prompt(context, tools)
                upto = self.template.render([*context, _without_reasoning(message)], tools=tools)
            except TemplateRefusal:
                continue
            at = len(prompt) if upto.startswith(prompt) else parting(prompt, upto)
            extra = prompt[at:]
            if block.is_end(extra):
                return upto[at:].lstrip() if extra and not extra.strip() else upto[at:]
            if behind := _behind_but_for_space(prompt, upto):
                return upto[behind:].lstrip()
            if (body := self._behind_last_words(context, message, tools)) is not None:
                return body
        return None

    def _behind_last_words(self, context: Sequence[Message], message: Message, tools: Tools) -> str | None:
        """Find a turn by the text between it and the last message, even if earlier text differs.

        Some templates write a part (a system prompt, a hint) only into the last question.
        """
        last = context[-1]
        if not isinstance(last.get("content"), str):
            return None
        marked = [*context[:-1], {**last, "content": last["content"].rstrip() + HERE}]
        prompt = self.prompt(marked, tools).partition(HERE)[2]
        upto = self.template.render([*marked, _without_reasoning(message)], tools=tools).partition(HERE)[2]
        return upto[len(prompt) :] if prompt and upto.startswith(prompt) else None

    def first_end(self, text: str) -> int | None:
        """Return the index after the first end token of a text."""
        match = self._end.search(text) if self._end else None
        return match.end() if match else None

    def closed(self, text: str, message: Message, words: list[Word], tools: Tools) -> str:
        """Return a turn up to its end token: the first one after all its words.

        If the template writes none there, add the release's, or the one that the template writes before a
        next turn.
        """
        for match in self._end.finditer(text) if self._end else ():
            if missing(words, text[: match.end()]) is None:
                return text[: match.end()]
        release = self.template.release
        end = release.call_end if message.get("tool_calls") else release.turn_end
        return text.rstrip() + end if end in self.ends else text + self._end_before_next(message, tools)

    def _end_before_next(self, message: Message, tools: Tools) -> str:
        """Return the end token that the template writes only when another turn follows; "" if none."""
        message = _without_reasoning(message)
        calls = message.get("tool_calls") or ()
        returns = [
            {"role": "tool", "tool_call_id": call.get("id"), "name": call["function"]["name"], "content": "?"}
            for call in calls
        ]
        try:
            upto = self.template.render([*ASKED, message], tools=tools)
            further = self.template.render([*ASKED, message, *(returns or ASKED)], tools=tools)
        except TemplateRefusal:
            return ""
        behind = further[len(upto) :] if further.startswith(upto) else ""
        match = self._end.search(behind) if self._end else None
        return behind[: match.end()] if match and not behind[: match.start()].strip() else ""


def speaks_first() -> DataError:
    message = "the assistant speaks first and this template has no prompt for that"
    return DataError(message, next="begin with a user or system message")


def _without_reasoning(message: Message) -> Message:
    """Drop a turn's reasoning, and the speaker's name, which no prompt contains.

    Kimi writes the name into the header.
    """
    return {name: value for name, value in message.items() if name not in (*REASONING_NAMES, "name")}


def _behind_but_for_space(prompt: str, upto: str) -> int:
    """Return where a text continues after a prompt that it starts with, ignoring white space; else 0.

    For a template with line breaks in the wrong place.
    """
    at = 0
    for char in prompt:
        if not char.isspace():
            while at < len(upto) and upto[at].isspace():
                at += 1
            if not upto.startswith(char, at):
                return 0
            at += 1
    return at
