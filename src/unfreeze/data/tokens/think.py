"""Think blocks of a chat template: the marks around reasoning, and how a text relates to a block."""

from __future__ import annotations

import re
from typing import Literal

from unfreeze.data.rows.row import Message
from unfreeze.data.tokens.forms import FORMS, as_template_reads
from unfreeze.data.tokens.releases import ThinkMarks
from unfreeze.data.tokens.templates import ChatTemplate, TemplateRefusal

MAX_TAG = 40  # maximum characters of a tag such as <|START_OF_TURN_TOKEN|>

# for an unknown release that opens a block in its prompt
USUAL_MARKS = ThinkMarks("<think>\n", "\n</think>\n\n")
ASKED: list[Message] = [{"role": "user", "content": "?"}]
_TAG_AT_END = re.compile(r"(?:<[^<>\s]+>\s*)?\Z")
# words of a turn that is rendered to see what a template puts around them
_SAID, _WHY = ("said-so", "for-this-reason")


class ThinkBlock:
    """A think block at the end of a prompt, or at the start of what follows."""

    def __init__(self, marks: ThinkMarks):
        self._ends = (marks.opening.strip(), marks.closing.strip())
        opening, closing = map(re.escape, self._ends)
        # </think> alone shows what it closes; <|end|> does not
        alone = "?" if marks.closing.strip().startswith("</") else ""
        self._at_end = re.compile(
            rf"(?:(?P<open>{opening}\s*){alone}(?P<close>{closing}\s*)|(?P<opened>{opening}\s*))?\Z"
        )
        self._at_start = re.compile(rf"\s*(?:{opening}\s*)?{closing}\s*")

    def state(self, prompt: str) -> Literal["", "open", "closed"]:
        """Return "open" if a prompt ends inside a think block, "closed" if right after one, else ""."""
        if not prompt.rstrip().endswith(self._ends):
            return ""
        match = self._at_end.search(prompt)
        return "closed" if match and match["close"] else "open" if match and match["opened"] else ""

    def is_end(self, text: str) -> bool:
        """Return True if a text is only white space and a think block, open or empty."""
        return self._at_end.fullmatch(text.strip()) is not None

    def cut(self, body: str) -> str:
        """Return the text after an empty block, or after the end of a block."""
        block = self._at_start.match(body)
        return body[block.end() :] if block else body


def written_marks(template: ChatTemplate) -> ThinkMarks | None:
    """Return what this template puts before and after the reasoning of an answer to a plain question.

    None if it writes no reasoning there.

    The opening is the text between prompt and reasoning. The closing is the text between reasoning and
    content, without what precedes content anyway.
    """
    # render one answer with and without reasoning, using words that occur nowhere else
    answer = {"role": "assistant", "content": _SAID}
    turns = (answer, answer | {"reasoning_content": _WHY})
    both = [as_template_reads([*ASKED, turn], None, template.source, template.release) for turn in turns]
    for form in (FORMS[0], FORMS[-1]):
        try:
            prompt = template.render(form(ASKED), add_generation_prompt=True)
            plain, full = (template.render(form(prepared.messages)) for prepared in both)
        except TemplateRefusal:
            continue
        # each word must occur once, reasoning first; otherwise the texts cannot be compared
        if (
            full.count(_WHY) != 1
            or full.count(_SAID) != 1
            or plain.count(_SAID) != 1
            or full.index(_SAID) < full.index(_WHY)
        ):
            continue
        # opening: from where prompt, plain and full text diverge up to the reasoning; closing: from there to
        # the content
        begin = min(parting(prompt, full), parting(plain, full))
        opening, between = (
            full[begin : full.index(_WHY)],
            full[full.index(_WHY) + len(_WHY) : full.index(_SAID)],
        )
        anyway = plain[begin : plain.index(_SAID)]
        closing = between.removesuffix(anyway)
        # the answer without reasoning starts with the closing mark
        closing = closing if closing.strip() else between
        # both write a block, and diverge inside it
        if not opening.strip() and anyway.strip().startswith(closing.strip()):
            opening = "".join(_TAG_AT_END.findall(full[:begin]))
        if opening.strip() and closing.strip():
            return ThinkMarks(opening, closing)
    return None


def overlap(text: str, opening: str) -> int:
    """Return how many characters of `opening` `text` already ends with."""
    return next((n for n in range(len(opening), 0, -1) if text.endswith(opening[:n])), 0)


def common_length(a: str, b: str) -> int:
    """Return the length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def parting(a: str, b: str) -> int:
    """Return where two texts diverge, moved back to the start of a tag that contains the place.

    For `<think>` and `</think>` that is before the `<`.
    """
    at = common_length(a, b)
    opened = max(a.rfind("<", 0, at), a.rfind("[", 0, at))
    inside = opened >= 0 and at - opened < MAX_TAG and not re.search(r"[>\]\s]", a[opened:at])
    return opened if inside else at
