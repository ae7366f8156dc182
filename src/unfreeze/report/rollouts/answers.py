"""Files of rollouts: RUN/rollouts/step-000012.jsonl.gz, JSON lines in gzip, a line per answer.

The JSON is ASCII with escapes, so that any text comes back as it was: NUL, ANSI, lone surrogates. A further
line {"dropped": n, "numbers": {…}} stands for answers that were left out, with the numbers of all answers of
the step.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Required

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from unfreeze.core.schema import AnyText, Int, Real

FOLDER = "rollouts"  # in the run's folder
NAME = re.compile(r"step-(\d{1,12})\.jsonl\.gz")


class Answer(TypedDict, total=False):
    """An answer of a step, as one line of the file.

    step, group, answer  numbers: group within the step, answer within its group, from 0
    row        row of the data that the prompt is from
    prompt     text of the prompt
    text       text of the answer
    turns      [[role, text], …] if there are several turns
    pieces     text of each sampled token, P of them
    logprobs   log p of each sampled token when it was sampled, P numbers in nats
    reward     None if the answer was not graded
    parts      name -> value of the reward's parts
    advantage  of the answer, or of each sampled token (P numbers)
    stop       reason at which sampling stopped: "end", "stop", "length", "window", …
    outcome    of the grading: "ok", "error", "timeout", "not a number", …
    message    words of the grader, if it failed; of a judge always
    """

    step: Required[Int]
    group: Required[Int]
    answer: Required[Int]
    row: Int | None
    prompt: AnyText
    text: AnyText
    turns: list[list[AnyText]]
    pieces: list[AnyText]
    logprobs: list[float | None]
    reward: Real | None
    parts: dict[AnyText, Real | None]
    advantage: Real | list[float | None] | None
    stop: AnyText
    outcome: AnyText
    message: AnyText


def file_of(folder: Path, step: int) -> Path:
    """File of a step in the folder of rollouts."""
    return folder / f"step-{step:06d}.jsonl.gz"


def files(folder: Path) -> dict[int, Path]:
    """Step -> its file, in order of steps; empty without the folder."""
    numbered = [(NAME.fullmatch(path.name), path) for path in folder.glob("step-*.jsonl.gz")]
    return dict(sorted((int(name[1]), path) for name, path in numbered if name))


def num_tokens(answer: Answer) -> int:
    """Sampled tokens of an answer; its words if the tokens are not in the file."""
    return len(answer.get("logprobs") or answer.get("pieces") or answer.get("text", "").split())


class StepFile:
    """The answers of one file, streamed. Damage ends or skips lines; it never raises.

    Known after a pass:
    dropped   answers that the writer left out
    whole     numbers of all answers of the step, if some were left out
    fault     "step-000012.jsonl.gz is cut: 96 answers could be read", or ""
    """

    def __init__(self, path: Path):
        self.path = path
        self.dropped, self.whole, self.fault = 0, dict[str, Any](), ""

    def __iter__(self) -> Iterator[Answer]:
        self.dropped, self.whole, self.fault = 0, {}, ""
        count, wrong, cut = 0, 0, ""
        try:
            with gzip.open(self.path, "rb") as lines:
                for line in lines:
                    parsed = _parsed(line)
                    if parsed is None:
                        wrong += 1
                    elif "dropped" in parsed:
                        self.dropped, self.whole = parsed["dropped"], parsed.get("numbers") or {}
                    else:
                        count += 1
                        yield parsed
        except (OSError, EOFError, zlib.error):  # gzip.BadGzipFile is an OSError
            cut = "is cut or damaged"
        lines_wrong = f"has {wrong:,} damaged {'line' if wrong == 1 else 'lines'}" if wrong else ""
        if faults := " and ".join(filter(None, (cut, lines_wrong))):
            self.fault = f"{self.path.name} {faults}: {count:,} answers could be read"


def _parsed(line: bytes) -> Any:
    """The line as an answer or an entry of dropped ones; None if it is neither."""
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refused)
        _checker().validate_python(value, strict=True)
    except (ValueError, RecursionError, ValidationError):  # JSON and Unicode errors are both ValueErrors
        return None
    return value


def _refused(name: str) -> float:
    """Refuse NaN and Infinity, which are not JSON: a browser would refuse the line."""
    raise ValueError(name)


class Dropped(TypedDict):
    """Number of answers that were left out, and the numbers of the whole step (numbers.py)."""

    dropped: Int
    numbers: dict[str, Any]


@cache
def _checker() -> TypeAdapter[Any]:
    """Validator of a line. Made on first use, because that takes milliseconds."""
    return TypeAdapter(Answer | Dropped)
