"""Training rows that hold rows of an evaluation: its scores then show what was memorised.

Two rows match if

exact    their prompts have the same words in the same order; case, punctuation and white space are ignored
n-gram   the training row has an n-gram of the evaluation row (contamination.py: 13 words, 20 Chinese
         characters), as `unfreeze data clean` looks for them
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from unfreeze.config.clean import Contamination
from unfreeze.data.clean.contamination import Evaluation
from unfreeze.data.clean.document import Document
from unfreeze.data.rows.row import Conversation


@dataclass(frozen=True)
class Passage:
    """One row as texts. name: "test.jsonl row 3". whole: prompt and answer; prompt: "" without one."""

    name: str
    whole: str
    prompt: str = ""


@dataclass(frozen=True)
class Match:
    """A training row that holds an evaluation row. words: the n-gram they share, or the prompt."""

    training: str
    evaluation: str
    kind: Literal["exact", "n-gram"]
    words: str


def contaminated(
    training: Iterable[Passage], evaluation: Iterable[Passage], recipe: Contamination | None = None
) -> list[Match]:
    """Return a match for each training row that holds an evaluation row, in the order of the training rows.

    Memory: 16 bytes for each n-gram of the evaluation. Of a training row only the first match is named.
    """
    grams = Evaluation(recipe or Contamination())
    prompts: dict[tuple[str, ...], str] = {}
    for passage in evaluation:
        grams.add([passage.whole], passage.name)
        if words := _words(passage.prompt or passage.whole):
            prompts.setdefault(words, passage.name)
    matches: list[Match] = []
    for passage in training:
        words = _words(passage.prompt or passage.whole)
        if words and words in prompts:
            matches.append(Match(passage.name, prompts[words], "exact", " ".join(words)))
        elif reason := grams(Document(passage.whole)):
            source, _, shared = reason.why.rpartition(": ")
            matches.append(Match(passage.name, source, "n-gram", shared))
    return matches


def passage_of(row: object, file: str) -> Passage | None:
    """Return a row of a data file as a passage; None for one without a text."""
    number, text = getattr(row, "row", 0), getattr(row, "text", "")
    if isinstance(row, Conversation):
        before = [_text(each) for each in row.messages if each["role"] != "assistant"]
        every = [_text(each) for each in row.messages]
        return Passage(f"{file} row {number}", "\n".join(every), "\n".join(before))
    return Passage(f"{file} row {number}", text) if text else None


def _text(message: dict[str, object]) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts: list[object] = list(content) if isinstance(content, list | tuple) else []  # type: ignore[arg-type]
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part)  # type: ignore[index]


def _words(text: str) -> tuple[str, ...]:
    return tuple(Document(text).units)
