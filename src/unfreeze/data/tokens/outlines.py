"""What rows of one shape become, as words and holes: the next such row is a join of strings.

The first row of a shape is rendered, cut and checked word by word (turns.py). Where the template can be
traced (tracing.py), the cuts fall on words of its own, and then they fall there in every row of the shape:

  prompt of turn k   a beginning of the text up to turn k, part by part
  what is taught     [words] content [words with the first end token]

Every word of the turn is taught then, since its content is a hole within what is taught. A row with anything
beside role and content, or with a think block in its content, goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from unfreeze.data.rows.row import Conversation, JsonObject, Message
from unfreeze.data.tokens.completions import Completions
from unfreeze.data.tokens.taught import Segment
from unfreeze.data.tokens.templates import ChatTemplate
from unfreeze.data.tokens.think import USUAL_MARKS
from unfreeze.data.tokens.tracing import MOST_ANSWERS, Hole, Parts, Question, Trace, is_short

MOST_OUTLINES = 10_000
"""Shapes that have outlines."""
Position = tuple[int, int]
"""Within parts: place of the words, characters of them."""
Cut = tuple[Parts, int | None]
"""A segment: its parts, and the turn whose words it teaches."""
DIFFERS = "differs"
"""Of two traces: their words part, whatever the texts are."""


class Outline(NamedTuple):
    """What rows of one shape become where all questions hold.

    notes: what is said of each of them
    """

    samples: list[list[tuple[Trace, int | None]]]
    questions: list[Question]
    notes: tuple[str, ...]

    def of(self, messages: Sequence[JsonObject]) -> list[list[Segment]]:
        """The samples of a row."""
        return [
            [Segment(text, turn) for trace, turn in sample if (text := trace.text(messages))]
            for sample in self.samples
        ]


class Outlines:
    """Those of one chat template, by shape.

    quote   as Renderer's
    whole   rows may become one example each
    each    rows may become one example for each turn that is taught
    """

    def __init__(
        self,
        template: ChatTemplate,
        completions: Completions,
        quote: Callable[[Any], Any],
        *,
        whole: bool,
        each: bool,
    ):
        self._template, self._completions, self._quote = template, completions, quote
        self._whole, self._each = whole, each
        self._known: dict[tuple[object, ...], list[Outline]] = {}
        self._tries: dict[tuple[object, ...], int] = {}

    @cached_property
    def _marks(self) -> list[str]:
        """Of a think block. In a content they could be taken for the template's."""
        marks = self._completions.marks or USUAL_MARKS
        known = [marks.opening.strip(), marks.closing.strip(), "think>"]
        return [mark for mark in known if mark == "think>" or "think>" not in mark]

    def key(self, row: Conversation) -> tuple[object, ...] | None:
        """What rows of one outline have in common; None for one that goes the long way."""
        if row.tools is not None:
            return None
        key: list[object] = [row.context]
        for message in row.messages:
            content = message.get("content")
            if len(message) != 2 or type(content) is not str:
                return None
            if any(mark in content for mark in self._marks):
                return None
            key += (message["role"], next(iter(message)), not content)
        return tuple(key) if is_short(row.messages) else None

    def find(
        self, key: tuple[object, ...], row: Conversation
    ) -> tuple[list[list[Segment]], tuple[str, ...]] | None:
        """Samples and notes of a row whose outline is known."""
        if not (known := self._known.get(key)):
            return None
        messages = [{**message, "content": self._quote(message["content"])} for message in row.messages]
        for outline in known:
            if all(question.holds(messages) for question in outline.questions):
                return outline.of(messages), outline.notes
        return None

    def learn(
        self,
        key: tuple[object, ...],
        row: Conversation,
        taught: Sequence[int],
        samples: list[list[Segment]],
        notes: tuple[str, ...],
    ) -> None:
        """Remember what a row became, where that is true of every such row."""
        if len(self._known) >= MOST_OUTLINES or (tries := self._tries.get(key, 0)) >= MOST_ANSWERS:
            return
        self._tries[key] = tries + 1
        messages = self._quote(row.messages)
        outline = self._outline(messages, taught, notes)
        if outline is not None and outline.of(messages) == samples:
            self._known.setdefault(key, []).append(outline)

    def _outline(
        self, messages: list[Message], taught: Sequence[int], notes: tuple[str, ...]
    ) -> Outline | None:
        if not taught:
            return None
        traces: list[Trace] = []

        def trace(count: int, prompt: bool) -> Parts | None:
            found = self._template.trace(messages[:count], prompt)
            traces.extend([found] if found else [])
            return found and found.parts

        # one example of the whole row, else one of each turn where the template surely rewrites earlier ones
        full = trace(len(messages), False)
        pairs = [(turn, trace(turn, True), trace(turn + 1, False)) for turn in taught]
        known = [(turn, prompt, upto) for turn, prompt, upto in pairs if prompt and upto]
        if full is None or len(known) < len(pairs):
            return None
        cuts: list[list[Cut]] | None = None
        begun = [begins(upto, prompt) for _, prompt, upto in known]
        stands = [begins(full, upto) for _, _, upto in known]
        if self._whole and all(isinstance(at, tuple) for at in [*begun, *stands]):
            cuts = self._cut_whole(full, known)
        elif self._each and (not self._whole or DIFFERS in (*begun, *stands)):
            cuts = self._cut_each(known)
        if cuts is None:
            return None
        made = [[(Trace(parts, ()), turn) for parts, turn in sample] for sample in cuts]
        questions = dict.fromkeys(question for trace in traces for question in trace.questions)
        return Outline(made, [*questions], notes)

    def _cut_whole(self, full: Parts, known: Sequence[tuple[int, Parts, Parts]]) -> list[list[Cut]] | None:
        segments: list[Cut] = []
        at: Position = (0, 0)
        for turn, prompt, upto in known:
            start, end = begins(upto, prompt), begins(full, upto)
            assert isinstance(start, tuple) and isinstance(end, tuple)
            closed = self._closed(full, start, end, turn)
            if closed is None or start < at:
                return None
            segments += [(between(full, at, start), None), (between(full, start, closed), turn)]
            at = closed
        return [[*segments, (between(full, at, end_of(full)), None)]]

    def _cut_each(self, known: Sequence[tuple[int, Parts, Parts]]) -> list[list[Cut]] | None:
        samples: list[list[Cut]] = []
        for turn, prompt, upto in known:
            start = begins(upto, prompt)
            if not isinstance(start, tuple):
                return None
            if (closed := self._closed(upto, start, end_of(upto), turn)) is None:
                return None
            samples.append([(prompt, None), (between(upto, start, closed), turn)])
        return samples

    def _closed(self, parts: Parts, start: Position, end: Position, turn: int) -> Position | None:
        """Where the first end token behind a turn's content ends; None where content could move it."""
        said = between(parts, start, end)
        if len(said) != 3:
            return None
        before, hole, behind = said
        if not isinstance(hole, Hole) or (hole.message, hole.field) != (turn, "content"):
            return None
        assert isinstance(before, str) and isinstance(behind, str)
        found = self._completions.first_end(behind)
        if found is None or self._completions.first_end(before) is not None:
            return None
        if any(_meet(before, text) or _meet(text, behind) for text in self._completions.ends):
            return None
        return end[0], (0 if start[0] != end[0] else start[1]) + found


def _meet(left: str, right: str) -> bool:
    """Whether the end of one text is a part of the beginning of the other, short of the whole."""
    return any(left.endswith(right[:size]) for size in range(1, min(len(left), len(right))))


def begins(longer: Parts, shorter: Parts) -> Position | str | None:
    """Where a text ends that another begins with; DIFFERS where it never does; None where texts decide."""
    for place, part in enumerate(shorter):
        if place >= len(longer):
            return None
        other, last = longer[place], place == len(shorter) - 1
        if part == other and not last:
            continue
        if isinstance(part, Hole) or isinstance(other, Hole):
            return None
        if last and other.startswith(part):
            return place, len(part)
        parted = any(a != b for a, b in zip(part, other, strict=False))
        return DIFFERS if parted or (last and place == len(longer) - 1) else None
    return None


def end_of(parts: Parts) -> Position:
    """Behind the last words."""
    return len(parts) - 1, len(_words(parts, len(parts) - 1))


def between(parts: Parts, start: Position, end: Position) -> Parts:
    """The parts from one position to another."""
    (first, begin), (last, stop) = start, end
    if first == last:
        return [_words(parts, first)[begin:stop]]
    return [_words(parts, first)[begin:], *parts[first + 1 : last], _words(parts, last)[:stop]]


def _words(parts: Parts, place: int) -> str:
    words = parts[place]
    assert isinstance(words, str)
    return words
