"""What a teacher writes, as rows for `unfreeze sft`: distillation where only its texts are known.

Sequence-level distillation (Kim & Rush, arXiv:1606.07947): a student is taught the teacher's own answers. The
two may have different tokenizers, since texts pass between them.

A file of rows, one JSON object each: the row's messages with the teacher's answer as the last turn, the only
one that is taught, and under "source" where it comes from. Answers are written as they come, so whatever ends
the command, the same command goes on behind them; no row is asked twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from unfreeze.core.errors import DataError
from unfreeze.data.rows.row import Conversation, Message, content_digest
from unfreeze.teach.address import WORDS, EndpointError
from unfreeze.untrusted.json_object import is_object, parse_object

TOGETHER = 8  # rows of one batch. A local model answers the same batch again after a break, so it is fixed
LEFT_OUT = ".left-out.jsonl"


@dataclass(frozen=True)
class Answer:
    """A teacher's turn. ended: "stop", or why it was cut: "length", "content_filter" …"""

    text: str
    ended: str
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def usable(self) -> bool:
        """Whether it can be taught: it ended by itself, and it says something."""
        return self.ended in ("stop", "tool_calls") and bool(self.text.strip() or self.calls)


Ask = Callable[[Sequence[Conversation]], Sequence["Answer | Exception"]]
"""Rows -> for each its answer, or why there is none."""


@dataclass(frozen=True)
class Written:
    """How many rows there are: answered (in the file), and left out (cut or empty answers, beside it)."""

    answered: int
    left_out: int


class TeacherAnswers:
    """The file of answers to some rows.

    out       the file; answers that are cut or empty go to <out>.left-out.jsonl, so that they aren't asked
              for again
    source    who answers and how: stands in each record, and must be the same when the file is gone on with
    """

    def __init__(self, out: Path, source: dict[str, Any]):
        self.out, self.beside, self.source = out, out.with_name(out.name + LEFT_OUT), source
        self._kept, self._out = self._known(self.out), self._known(self.beside)

    @property
    def count(self) -> Written:
        """What is written by now."""
        return Written(len(self._kept), len(self._out))

    def missing(self, rows: Sequence[Conversation]) -> list[Conversation]:
        """Rows without an answer. Raises DataError where a row was answered that says something else now."""
        known = self._kept | self._out
        for row in rows:
            if (before := known.get(row.row)) and before != _digest(row):
                raise DataError(
                    f"row {row.row} is another than the one that {self.out} has an answer to",
                    next="the data as it was, or another --out",
                )
        return [row for row in rows if row.row not in known]

    def write(self, rows: Sequence[Conversation], ask: Ask, *, again: bool = False) -> Iterator[Written]:
        """Ask for what is missing, a batch after the other. -> after each, what is written in all.

        again: a batch of which some rows are missing is asked for whole (a local model, whose answers to a
        batch depend on all of it when they are drawn). Raises the first fault, when what came is written.
        """
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with _appending(self.out) as kept, _appending(self.beside) as left_out:
            for first in range(0, len(rows), TOGETHER):
                batch = rows[first : first + TOGETHER]
                if not (missing := self.missing(batch)):
                    continue
                asked = batch if again else missing
                fault = None
                answers = ask(asked)
                going = bool(self._kept) or any(isinstance(each, Answer) and each.usable for each in answers)
                for row, answer in zip(asked, answers, strict=True):
                    # a server that answers others refuses this row: it is too long, or not to its taste
                    if going and isinstance(answer, EndpointError) and answer.status in (400, 413, 422):
                        answer = Answer("", answer.message[:WORDS])
                    if isinstance(answer, Exception):
                        fault = fault or answer
                    elif row in missing:
                        file, known = (kept, self._kept) if answer.usable else (left_out, self._out)
                        file.write(json.dumps(self._record(row, answer), ensure_ascii=False) + "\n")
                        known[row.row] = _digest(row)
                for file in (kept, left_out):
                    file.flush()
                    os.fsync(file.fileno())
                if fault is not None:
                    raise fault
                yield self.count
        if not self.beside.stat().st_size:
            self.beside.unlink()

    def _record(self, row: Conversation, answer: Answer) -> dict[str, Any]:
        said: Message = {"role": "assistant", "content": answer.text}
        said |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        said |= {"tool_calls": answer.calls} if answer.calls else {}
        before = [
            {**message, "weight": 0} if message["role"] == "assistant" else message
            for message in row.messages
        ]
        about = {"row": row.row, "asked": _digest(row), "ended": answer.ended}
        tools = {"tools": row.tools} if row.tools else {}
        return {"messages": [*before, said], **tools, "source": {**self.source, **about}}

    def _known(self, path: Path) -> dict[int, str]:
        """Row -> digest of what was asked, of a file's whole lines."""
        known: dict[int, str] = {}
        for number, line in enumerate(_whole_lines(path), 1):
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
                    f"{path} was answered with {other} = {own.get(other)!r}, now it is"
                    f" {self.source.get(other)!r}",
                    next="the same as then, or another --out",
                )
            known[about["row"]] = str(about.get("asked"))
        return known


def _digest(row: Conversation) -> str:
    return hashlib.blake2b(content_digest(row), digest_size=8).hexdigest()


def _whole_lines(path: Path) -> list[bytes]:
    """A file's lines; one that a break left half is none."""
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def _appending(path: Path) -> TextIO:
    """The file, opened behind its last whole line."""
    whole = sum(len(line) + 1 for line in _whole_lines(path))
    if path.is_file():
        os.truncate(path, whole)
    return path.open("a", encoding="utf-8")
