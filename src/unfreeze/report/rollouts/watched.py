"""The canaries of a run that goes on: each is a warning once, at the first step that it sounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from unfreeze.report.rollouts.answers import FOLDER, Answer, StepFile, files
from unfreeze.report.rollouts.canaries import WINDOW, alarms
from unfreeze.report.rollouts.numbers import Numbers, checked, numbers_of, reward_of


class Watched:
    """The numbers that alarms() compares: of the first steps and of the last, WINDOW of each.

    run_dir: a resumed run reads the steps that are there; their alarms were warnings before.
    """

    def __init__(self, run_dir: Path):
        self._first: list[Numbers] = []
        self._last: deque[Numbers] = deque(maxlen=WINDOW)
        there = list(files(run_dir / FOLDER).items())
        for step, path in there if len(there) <= 2 * WINDOW else [*there[:WINDOW], *there[-WINDOW:]]:
            file = StepFile(path)
            read = numbers_of(step, file)
            self._take(checked(file.whole) or read)
        self._named = {_named(sentence) for sentence in self._sentences()}

    def look(self, step: int, answers: Sequence[Answer]) -> list[str]:
        """Count a step. -> the alarms that sound for the first time."""
        self._take(numbers_of(step, answers))
        new = [sentence for sentence in self._sentences() if _named(sentence) not in self._named]
        self._named |= {_named(sentence) for sentence in new}
        return new

    def _take(self, numbers: Numbers) -> None:
        (self._first if len(self._first) < WINDOW else self._last).append(numbers)

    def _sentences(self) -> list[str]:
        steps = [*self._first, *self._last]
        return alarms([each["canaries"] for each in steps], [reward_of(each) for each in steps])


def _named(sentence: str) -> str:
    """The part of an alarm that stays while its numbers change."""
    return sentence.partition(" (")[0]
