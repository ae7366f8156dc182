"""Write a teacher's answers as rows for `unfreeze sft`: distillation when only its texts are available.

Sequence-level distillation (Kim & Rush, arXiv:1606.07947): a student is trained on the teacher's own answers.
The two may have different tokenizers, because only texts are exchanged.

The output has one JSON object per row: the row's messages with the teacher's answer as the last turn, the
only supervised one, and its origin under "source". Answers are written as they arrive. If the command stops,
running it again continues there; no row is queried twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unfreeze.core.errors import DataError
from unfreeze.core.whole_lines import appending, whole_lines
from unfreeze.data.rows.row import Conversation, Message, content_digest
from unfreeze.teach.address import WORDS, EndpointError
from unfreeze.untrusted.json_object import is_object, parse_object

TOGETHER = 8  # rows that are asked, then written
LEFT_OUT = ".left-out.jsonl"
REFUSED = "refusal"
"""Answer.ended of a model that refuses, in OpenAI's field for it; its text says why."""


@dataclass(frozen=True)
class Answer:
    """A teacher's turn. ended: "stop", or why it was cut: "length", "content_filter" …

    about: facts that decide nothing: the server's usage and model name, the time
    """

    text: str
    ended: str
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    about: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)

    @property
    def usable(self) -> bool:
        """True if it can be trained on: it ended by itself and is not empty."""
        return self.ended in ("stop", "tool_calls") and bool(self.text.strip() or self.calls)


Ask = Callable[[Sequence[Conversation]], Sequence["Answer | BaseException"]]
"""Rows -> the answer to each, or the error, or the Ctrl-C that came before it."""


@dataclass(frozen=True)
class Written:
    """Number of rows answered (in the file) and left out (cut or empty answers, in a second file)."""

    answered: int
    left_out: int


class TeacherAnswers:
    """The file of answers to some rows.

    out       the file; cut or empty answers go to <out>.left-out.jsonl, so that they aren't requested
              again
    source    who answers and how: stored in each record, and must be unchanged when the file is continued
    """

    def __init__(self, out: Path, source: dict[str, Any]):
        self.out, self.beside, self.source = out, out.with_name(out.name + LEFT_OUT), source
        self._kept, self._out = self._known(self.out), self._known(self.beside)

    @property
    def count(self) -> Written:
        """Return the counts written so far."""
        return Written(len(self._kept), len(self._out))

    def missing(self, rows: Sequence[Conversation]) -> list[Conversation]:
        """Return rows without an answer. Raises DataError if an answered row has changed."""
        known = self._kept | self._out
        for row in rows:
            if (before := known.get(row.row)) and before != _digest(row):
                raise DataError(
                    f"row {row.row} differs from the one answered in {self.out}",
                    next="use the original data, or another --out",
                )
        return [row for row in rows if row.row not in known]

    def write(self, rows: Sequence[Conversation], ask: Ask, *, together: int = TOGETHER) -> Iterator[Written]:
        """Request missing answers, `together` at a time; after each yield the totals written.

        Raises the first error after writing what arrived.
        """
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with appending(self.out) as answered, appending(self.beside) as left_out:
            missing = self.missing(rows)
            for first in range(0, len(missing), together):
                requested = missing[first : first + together]
                fault = None
                answers = ask(requested)
                going = bool(self._kept) or any(isinstance(each, Answer) and each.usable for each in answers)
                for row, answer in zip(requested, answers, strict=True):
                    # the server answers others but refuses this row: it is too long, or filtered
                    if going and isinstance(answer, EndpointError) and answer.status in (400, 413, 422):
                        answer = Answer("", answer.message[:WORDS])
                    if isinstance(answer, BaseException):
                        fault = fault or answer
                    else:
                        file, known = (answered, self._kept) if answer.usable else (left_out, self._out)
                        file.write(json.dumps(self._record(row, answer), ensure_ascii=False) + "\n")
                        known[row.row] = _digest(row)
                for file in (answered, left_out):
                    file.flush()
                    os.fsync(file.fileno())
                if fault is not None:
                    raise fault
                yield self.count
        if not self.beside.stat().st_size:
            self.beside.unlink()

    def _record(self, row: Conversation, answer: Answer) -> dict[str, Any]:
        turn: Message = {"role": "assistant", "content": answer.text}
        turn |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        turn |= {"tool_calls": answer.calls} if answer.calls else {}
        before = [
            {**message, "weight": 0} if message["role"] == "assistant" else message
            for message in row.messages
        ]
        about = {"row": row.row, "asked": _digest(row), "ended": answer.ended}
        tools = {"tools": row.tools} if row.tools else {}
        return {"messages": [*before, turn], **tools, "source": {**self.source, **about}}

    def _known(self, path: Path) -> dict[int, str]:
        """Return row -> digest of its prompt, from a file's complete lines."""
        known: dict[int, str] = {}
        for number, line in enumerate(whole_lines(path), 1):
            record = parse_object(line, f"{path.name}, line {number}", DataError, next="another --out")
            about = record.get("source")
            if not is_object(about) or not isinstance(about.get("row"), int):
                raise DataError(
                    f"{path}, line {number} was not written by this command", next="another --out"
                )
            own = {name: value for name, value in about.items() if name not in ("row", "asked", "ended")}
            if own != self.source:
                other = next(
                    name for name in {**own, **self.source} if own.get(name) != self.source.get(name)
                )
                raise DataError(
                    f"{path} was answered with {other} = {own.get(other)!r}, but now it is"
                    f" {self.source.get(other)!r}",
                    next="use the same value, or another --out",
                )
            known[about["row"]] = str(about.get("asked"))
        return known


def _digest(row: Conversation) -> str:
    return hashlib.blake2b(content_digest(row), digest_size=8).hexdigest()
