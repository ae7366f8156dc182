"""Curricula: prompts that a pass over the data leaves out, by the rewards of their last groups.

    uniform    none
    adaptive   a prompt whose last k groups had no signal is drawn with probability 2^-k, at least 1/16
    hard       a prompt whose answers all had a reward of 1 or more is left out of the next pass

A draw depends on (seed, pass, prompt) and on the records alone, which the cursor holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from unfreeze.core.draws import uniform

Name = Literal["uniform", "hard", "adaptive"]

RAREST = 4  # halvings
SOLVED = 1.0


class Curriculum:
    """Takes every prompt. The base of the others.

    records  prompt, as text -> what its last groups were like; plain JSON
    """

    def __init__(self, seed: int, records: Mapping[str, int] | None = None):
        self.seed, self.records = seed, dict(records or {})

    def takes(self, epoch: int, prompt: int) -> bool:
        """Return True if this pass over the data has this prompt."""
        return True

    def saw(self, epoch: int, prompt: int, rewards: Sequence[float], signal: bool) -> None:
        """Note the rewards of a prompt's group in this pass. signal: they differ."""


class Adaptive(Curriculum):
    """records: groups without a signal since the last with one."""

    def takes(self, epoch: int, prompt: int) -> bool:
        return uniform(self.seed, epoch, prompt) < 0.5 ** self.records.get(str(prompt), 0)

    def saw(self, epoch: int, prompt: int, rewards: Sequence[float], signal: bool) -> None:
        silent = self.records.pop(str(prompt), 0)
        if not signal:
            self.records[str(prompt)] = min(silent + 1, RAREST)


class Hard(Curriculum):
    """records: the pass in which a prompt was solved by all answers."""

    def takes(self, epoch: int, prompt: int) -> bool:
        return self.records.get(str(prompt), epoch) != epoch - 1

    def saw(self, epoch: int, prompt: int, rewards: Sequence[float], signal: bool) -> None:
        self.records.pop(str(prompt), None)
        if rewards and min(rewards) >= SOLVED:
            self.records[str(prompt)] = epoch


CURRICULA: Mapping[Name, type[Curriculum]] = {"uniform": Curriculum, "hard": Hard, "adaptive": Adaptive}
"""Name of --curriculum -> its class."""
