"""The learning rate as a pure function of the step.

Linear warm-up, then cosine, linear, constant or warm-up-stable-decay.

Steps count from 0. Nothing here holds state, so the schedule of a resumed run always matches its step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from unfreeze.core.errors import ConfigError

Kind = Literal["cosine", "linear", "constant", "wsd"]


@dataclass(frozen=True)
class Schedule:
    """learning_rate(step) = peak * factor(step).

    peak           the learning rate after warm-up, > 0
    steps          optimizer steps of the whole run, >= 1
    kind           shape of the decay after warm-up
    warmup_steps   0 <= warmup_steps <= steps. Its step s has factor (s + 1) / warmup_steps: the first
                   step already updates, the last is at the peak
    decay_steps    length of the final decay of "wsd" only; 0 <= decay_steps <= steps - warmup_steps
    final          target factor of the decay, in [0, 1]. It is reached at step `steps`, one past the
                   last: no step is spent at rate 0
    """

    peak: float
    steps: int
    kind: Kind = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise ConfigError(
                f"learning rate {self.peak} is not a positive number",
                next="set learning_rate, for LoRA 1e-4 to 1e-3",
            )
        if self.steps < 1:
            raise ConfigError(f"{self.steps} steps: a run needs at least 1", next="set steps or epochs")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ConfigError(
                f"warmup_steps {self.warmup_steps} is not in 0 .. steps = {self.steps}",
                next="lower warmup_steps",
            )
        if not 0 <= self.decay_steps <= self.steps - self.warmup_steps:
            raise ConfigError(
                f"decay_steps {self.decay_steps} is not in 0 .. steps - warmup_steps ="
                f" {self.steps - self.warmup_steps}",
                next="lower decay_steps",
            )
        if not 0 <= self.final <= 1:
            raise ConfigError(f"final factor {self.final} is not in 0 .. 1")
        if self.kind not in ("cosine", "linear", "constant", "wsd"):
            raise ConfigError(f"unknown schedule {self.kind!r}: one of cosine, linear, constant, wsd")

    def learning_rate(self, step: int) -> float:
        """Return the rate of update number `step`, counted from 0."""
        return self.peak * self.factor(step)

    def factor(self, step: int) -> float:
        """Return (s+1)/w in warm-up; then the decay of the chosen schedule.

        With p the finished part of the decay, from 0 to 1, and f = final:

        cosine    f + (1-f) (1 + cos(pi p)) / 2         linear   f + (1-f) (1 - p)        constant  1
        wsd       1, and over the last decay_steps f + (1-f) (1 - sqrt p), the decay that lost least in
                  Haegele et al., arXiv:2405.18392
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        length = self.decay_steps if self.kind == "wsd" else self.steps - self.warmup_steps
        behind = step - (self.steps - length)
        p = min(1.0, max(0.0, behind / length)) if length else float(step >= self.steps)
        left = {
            "cosine": (1 + math.cos(math.pi * p)) / 2,
            "linear": 1 - p,
            "constant": 1.0,
            "wsd": 1 - math.sqrt(p),
        }[self.kind]
        return self.final + (1 - self.final) * left
