"""Copies of rollout files that a page can load without a server: rollouts/step-000012.js.

A page that was opened from a disk may not fetch files, but it may load a script. So the copy is one: a call
with the gzip bytes in base64, which holds no text of a model or a grader as code. Its first line is a comment
with the numbers of the step, so that a step is read once.

    // {"of": [bytes, time], "numbers": {…}, "prompts": [hash of each group], "dropped": n, "fault": ""}
    unfreezeRollouts(12, "H4sI…", {"before": {"3": 7}, "dropped": 0, "fault": ""});

before: group -> last step before this one that has the same prompt.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unfreeze.report.rollouts.answers import FOLDER, Answer, StepFile, files
from unfreeze.report.rollouts.numbers import Numbers, checked, numbers_of

VERSION = 1  # of the copy; another one is made anew


class Step(NamedTuple):
    """A step of rollouts. prompts: group -> hash of its prompt. fault: a sentence on damage, or ""."""

    numbers: Numbers
    prompts: dict[int, str]
    dropped: int
    fault: str


def copy_steps(run_dir: Path) -> list[Step]:
    """Make the copies that are missing or older than their file, remove those without one. -> all steps."""
    folder = run_dir / FOLDER
    sources, steps = files(folder), list[Step]()
    for orphan in set(folder.glob("step-*.js")) - {copy_of(source) for source in sources.values()}:
        orphan.unlink(missing_ok=True)
    latest: dict[str, int] = {}
    for number, source in sources.items():
        step = _known(source) or _copied(number, source, latest)
        latest |= dict.fromkeys(step.prompts.values(), number)
        steps.append(step)
    return steps


def _state(source: Path) -> list[int]:
    """Size and time of the file, which change when it is written again."""
    stat = source.stat()
    return [VERSION, stat.st_size, stat.st_mtime_ns]


def copy_of(source: Path) -> Path:
    """Copy of a file of rollouts."""
    return source.with_name(source.name.removesuffix(".jsonl.gz") + ".js")


def _known(source: Path) -> Step | None:
    """The step by its copy's first line; None if there is none, or if the file has changed."""
    try:
        with copy_of(source).open("rb") as copy:
            head = json.loads(copy.readline().removeprefix(b"// "))
        numbers = checked(head["numbers"])
        prompts = {int(group): str(name) for group, name in head["prompts"].items()}
        if head["of"] != _state(source) or numbers is None:
            return None
        return Step(numbers, prompts, int(head["dropped"]), str(head["fault"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _copied(number: int, source: Path, latest: dict[str, int]) -> Step:
    """Read the file once and write its copy. latest: hash of a prompt -> last step before that has it."""
    state, file, prompts = _state(source), StepFile(source), dict[int, str]()

    def noted() -> Iterator[Answer]:
        for answer in file:
            prompts.setdefault(answer["group"], _hash(answer.get("prompt", "")))
            yield answer

    read = numbers_of(number, noted())
    step = Step(checked(file.whole) or read, prompts, file.dropped, file.fault)
    # a damaged file is packed again without what could not be read: a browser would refuse all of it
    packed = _packed(StepFile(source)) if step.fault else source.read_bytes()
    head = {"of": state, **step._asdict()}
    before = {group: latest[name] for group, name in prompts.items() if name in latest}
    about = json.dumps({"before": before, "dropped": step.dropped, "fault": step.fault})
    code = f'unfreezeRollouts({number}, "{base64.b64encode(packed).decode()}", {about});'
    temporary = source.with_name(f"{source.name}.js.{os.getpid()}.tmp")
    try:
        temporary.write_text(f"// {json.dumps(head)}\n{code}\n", encoding="ascii")
        temporary.replace(copy_of(source))
    finally:
        temporary.unlink(missing_ok=True)
    return step


def _packed(file: StepFile) -> bytes:
    """Gzip of the lines that can be read."""
    return gzip.compress("".join(json.dumps(answer) + "\n" for answer in file).encode("ascii"), mtime=0)


def _hash(prompt: str) -> str:
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
