"""The learning rate as a pure function of the step.

Linear warm-up, then cosine, linear, constant or warm-up-stable-decay. "one_cycle" has a warm-up of its own.

Steps count from 0. Nothing here holds state, so the schedule of a resumed run always matches its step.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from unfreeze.core.errors import ConfigError

Kind = Literal["cosine", "linear", "constant", "wsd", "one_cycle"]
KINDS: tuple[str, ...] = get_args(Kind)
ONE_CYCLE_START = 1 / 25  # torch's div_factor
ONE_CYCLE_FINAL = 1 / 25 / 1e4  # torch's div_factor and final_div_factor


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
                   last: no step is spent at rate 0. one_cycle, as in torch, reaches it at the last step
    start          factor of step 0 of "one_cycle" only, in (0, 1]
    """

    peak: float
    steps: int
    kind: Kind = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    final: float = 0.0
    start: float = ONE_CYCLE_START

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
        if not 0 < self.start <= 1:
            raise ConfigError(f"start factor {self.start} is not above 0 and at most 1")
        if self.kind not in KINDS:
            raise ConfigError(f"unknown schedule {self.kind!r}: one of {', '.join(KINDS)}")

    def record(self) -> dict[str, Any]:
        """Return the fields for a save. `start` only if it counts: saves of earlier versions lack it."""
        return {k: v for k, v in asdict(self).items() if k != "start" or self.kind == "one_cycle"}

    def learning_rate(self, step: int) -> float:
        """Return the rate of update number `step`, counted from 0."""
        return self.peak * self.factor(step)

    def factor(self, step: int) -> float:
        """Return (s+1)/w in warm-up; then the decay of the chosen schedule.

        With p the finished part of the decay, from 0 to 1, and f = final:

        cosine    f + (1-f) (1 + cos(pi p)) / 2         linear   f + (1-f) (1 - p)        constant  1
        wsd       1, and over the last decay_steps f + (1-f) (1 - sqrt p), the decay that lost least in
                  Haegele et al., arXiv:2405.18392
        one_cycle 1 + (start-1) (1 + cos(pi q)) / 2 with q = s / (w-1) up to step w - 1; then the cosine with
                  p = (s - (w-1)) / (steps - w). It is torch's OneCycleLR (Smith and Topin, arXiv:1708.07120)
                  with pct_start = w / steps, div_factor = 1 / start, final_div_factor = start / f
        """
        if self.kind == "one_cycle":
            return self._one_cycle(step)
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        length = self.decay_steps if self.kind == "wsd" else self.steps - self.warmup_steps
        behind = step - (self.steps - length)
        p = min(1.0, max(0.0, behind / length)) if length else float(step >= self.steps)
        left = {"cosine": _cosine(p), "linear": 1 - p, "constant": 1.0, "wsd": 1 - math.sqrt(p)}[self.kind]
        return self.final + (1 - self.final) * left

    def _one_cycle(self, step: int) -> float:
        """Return the factor of one_cycle; without warm-up steps it starts at the peak."""
        top = max(0, self.warmup_steps - 1)
        if step < top:
            return 1 + (self.start - 1) * _cosine(step / top)
        p = min(1.0, (step - top) / max(1, self.steps - 1 - top))
        return self.final + (1 - self.final) * _cosine(p)


def _cosine(p: float) -> float:
    """Return (1 + cos(pi p)) / 2: 1 at p = 0, 0 at p = 1."""
    return (1 + math.cos(math.pi * p)) / 2
