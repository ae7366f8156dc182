"""Metrics of an answer beside the one that its row has: each is 1 or 0.

exact    equal, without spaces at the ends
contains the row's answer is a part of the text, as whole words where the script has words
numeric  the last number of the text equals the last of the row's answer, to 1e-6 of it
choice   the likeliest of the row's `choices` after the prompt is the row's answer (rows.py)

and two that may take forever, so that they run in processes of their own (guarded.py):

regex        the row's answer is a pattern that occurs in the text
math-verify  both are equal as mathematics, by the library math-verify

A row's answer may be a list; the best counts. Of a text that reasons, only what follows the last </think>
counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unfreeze.core.errors import DataError
from unfreeze.data.rows.asked import PAIRS
from unfreeze.data.rows.row import Conversation
from unfreeze.evaluate.style import contains as contains_words
from unfreeze.untrusted.json_object import is_list, is_object

END_OF_REASONING = "</think>"
NUMBER = re.compile(
    r"(?<![\w.])[-+\N{MINUS SIGN}]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)\.\d+|\.\d+|(?<=\d))"
    r"(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?"
)
EQUAL = 1e-6
UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF))
UNSPACED += ((0xAC00, 0xD7AF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
"""Letters of scripts without spaces between words, or whose particles join their word."""


class Grade(Protocol):
    """The worth of one answer: a number, or None with the reason (rollout's Graded is one)."""

    @property
    def reward(self) -> float | None: ...

    @property
    def outcome(self) -> str: ...

    @property
    def message(self) -> str: ...


Answered = tuple[Conversation, str]
"""(row, text of the model's answer). The row's `columns` have what the row says is right as "answer"."""
GradeAll = Callable[[Sequence[Answered]], Sequence[Grade]]


@dataclass(frozen=True)
class Simple:
    """A Grade of a metric of this file."""

    reward: float | None
    outcome: str = "ok"
    message: str = ""


def final(text: str) -> str:
    """Return the text without its reasoning."""
    return text.rpartition(END_OF_REASONING)[2]


def exact(text: str, expected: str) -> bool:
    """Return True for equal texts, without spaces at the ends."""
    return text.strip() == expected.strip()


def contains(text: str, expected: str) -> bool:
    """Return True if `expected` occurs in the text: "7" not within "79", "Au" not within "Australia"."""
    phrase = expected.strip()
    if any(low <= ord(letter) <= high for letter in (phrase[0], phrase[-1]) for low, high in UNSPACED):
        return phrase in text
    return contains_words(text, phrase)


def numeric(text: str, expected: str) -> bool:
    """Return True if the last numbers of both are equal: "so it is 1,234.50" and "1234.5"."""
    wanted, written = last_number(expected), last_number(text)
    if wanted is None or written is None:
        return False
    return math.isclose(wanted, written, rel_tol=EQUAL, abs_tol=EQUAL * EQUAL)


def last_number(text: str) -> float | None:
    """Return the last number of a text; None without one. Commas are thousands; 3/4 is one number."""
    numbers = [match[0] for match in NUMBER.finditer(text) if match[0]]
    if not numbers:
        return None
    above, _, below = numbers[-1].replace(",", "").replace("\N{MINUS SIGN}", "-").partition("/")
    try:
        return float(above) / float(below or 1)
    except ZeroDivisionError:
        return None


SIMPLE: Mapping[str, Callable[[str, str], bool]] = {"exact": exact, "contains": contains, "numeric": numeric}
GUARDED = ("regex", "math-verify")
CHOICE = "choice"
METRICS = (*SIMPLE, *GUARDED, CHOICE)


def simple(name: str) -> GradeAll:
    """Return the metric of this file with that name."""
    metric = SIMPLE[name]

    def grade(answers: Sequence[Answered]) -> list[Simple]:
        return [
            Simple(float(any(metric(final(text), each) for each in expected_of(row))))
            for row, text in answers
        ]

    return grade


def refuse_row(name: str, row: Conversation) -> None:
    """Raise DataError for a row whose answer this metric cannot use."""
    for each in expected_of(row):
        if name != "exact" and not each.strip():
            raise DataError(f"row {row.row}: its answer is empty", next="remove the row, or use exact")
        if name == "regex":
            try:
                re.compile(each)
            except (re.error, RecursionError, OverflowError) as fault:
                raise DataError(
                    f"row {row.row}: its answer {each[:60]!r} is no pattern: {fault}",
                    next="rows:FILE:contains",
                ) from None
        if name == "numeric" and last_number(each) is None:
            raise DataError(
                f"row {row.row}: its answer {each[:60]!r} has no number", next="rows:FILE:contains, or exact"
            )


def expected_of(row: Conversation) -> list[str]:
    """Return the row's answer, or its answers. Raises DataError without any.

    The column "answer", else what would be trained on: completion, output, or the last assistant's turn.
    """
    value = _answer(row)
    several: list[Any] = value if is_list(value) else [value]
    texts = [_text(each) for each in several]
    if not texts or any(text is None for text in texts):
        there = ", ".join(sorted(row.columns)[:8])
        raise DataError(
            f"row {row.row} has no answer to compare with; its columns: {there}",
            next='a column "answer", --columns answer=COLUMN, or a metric of your own: rows:FILE:my.py',
        )
    return [text for text in texts if text is not None]


def _answer(row: Conversation) -> Any:
    if row.columns.get("answer") is not None:
        return row.columns["answer"]
    for question, answer in PAIRS:
        if row.shape == f"{question}/{answer}" and (value := row.columns.get(answer)) is not None:
            return value[-1:] if is_list(value) and value and is_object(value[-1]) else value
    for name, who in (("messages", "role"), ("conversations", "from")):
        turns = row.columns.get(name)
        last = turns[-1] if is_list(turns) and turns else None
        if is_object(last) and last.get(who) in ("assistant", "gpt"):
            return last
    return None


def _text(value: Any) -> str | None:
    """Return an answer as text: a text, a number, or a message; None for anything else."""
    if is_object(value):
        value = value.get("content", value.get("value"))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)
    return value if isinstance(value, str) else None
