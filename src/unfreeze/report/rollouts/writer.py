"""Write the answers of each step as RUN/rollouts/step-000012.jsonl.gz, within a limit of bytes."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unfreeze.core.units import format_bytes
from unfreeze.report.rollouts.answers import FOLDER, Answer, file_of, files
from unfreeze.report.rollouts.numbers import numbers_of

LIMIT = 2 * 2**30  # bytes of the folder
COPIED = 4 / 3
"""Bytes of the page's copy (copies.py) per byte of a file: base64."""
BY_TOKEN = ("logprobs", "advantage")
DIGITS = 5  # after the point, of numbers by token: they are for reading, and these are half of a file's bytes


class Rollouts:
    """The files of a run. Answers may come in any order, in groups of any size.

    limit: bytes of the folder with the page's copies. Above it a step keeps the worst and the best answer of
    each group, above twice the limit only its numbers. Files that are there count; their steps are replaced.
    """

    def __init__(self, run_dir: Path | str, limit: float = LIMIT):
        self.folder = Path(run_dir) / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)  # from here on the run is one with rollouts
        self.limit = limit
        self._sizes = {step: path.stat().st_size for step, path in files(self.folder).items()}
        self._warned = 0

    @property
    def num_bytes(self) -> float:
        """Bytes of the folder with the copies of the page, if all of them are made."""
        return sum(self._sizes.values()) * (1 + COPIED)

    def write(self, step: int, answers: Sequence[Answer]) -> str | None:
        """Write a step's file atomically. -> a sentence for a warning at the first step that keeps fewer.

        Raises OSError if the disk is full; no file is then left half-written.
        """
        self._sizes.pop(step, None)
        fullness = 2 if self.num_bytes > 2 * self.limit else 1 if self.num_bytes > self.limit else 0
        kept = answers if fullness == 0 else ends(answers) if fullness == 1 else []
        lines: list[Any] = list(kept)
        if dropped := len(answers) - len(kept):
            lines.append({"dropped": dropped, "numbers": numbers_of(step, answers)})
        self._sizes[step] = write_lines(file_of(self.folder, step), lines)
        if not dropped or fullness <= self._warned:
            return None
        self._warned = fullness
        rest = "the worst and best answer of a group" if fullness == 1 else "no answers, only their numbers"
        return (
            f"rollouts: the folder holds {format_bytes(self.num_bytes)}, above its limit of"
            f" {format_bytes(self.limit * fullness)}; from step {step:,} on it keeps {rest}"
        )

    def drop_after(self, step: int) -> None:
        """Remove the files of later steps, when a run resumes from this one."""
        for later in [number for number in self._sizes if number > step]:
            file_of(self.folder, later).unlink(missing_ok=True)
            del self._sizes[later]


def ends(answers: Sequence[Answer]) -> list[Answer]:
    """The worst and the best answer of each group, in order. An answer without a reward is the worst."""
    groups: dict[int, list[int]] = {}
    for place, answer in enumerate(answers):
        groups.setdefault(answer["group"], []).append(place)

    def reward(place: int) -> float:
        value = answers[place].get("reward")
        return -math.inf if value is None else value

    places = {extreme(group, key=reward) for group in groups.values() for extreme in (min, max)}
    return [answers[place] for place in sorted(places)]


def write_lines(path: Path, lines: Iterable[Any]) -> int:
    """Write lines of JSON in gzip, atomically and without the time, so that equal lines give equal bytes.

    -> bytes of the file.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            for line in lines:
                file.write(json.dumps(_line(line), allow_nan=False, separators=(",", ":")).encode("ascii"))
                file.write(b"\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


def _line(line: dict[str, Any]) -> dict[str, Any]:
    """A line for JSON: None for what is not finite; numbers by token with DIGITS digits."""
    return {name: _finite(value, DIGITS if name in BY_TOKEN else None) for name, value in line.items()}


def _finite(value: Any, digits: int | None) -> Any:
    if isinstance(value, float):
        return None if not math.isfinite(value) else value if digits is None else round(value, digits)
    if isinstance(value, dict):
        return {str(name): _finite(item, digits) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, digits) for item in value]
    return value
