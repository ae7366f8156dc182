"""Canaries: does the reward follow the length of an answer, or its form alone?

    r = sum (R - mean R)(x - mean x) / sqrt(sum (R - mean R)^2 sum (x - mean x)^2),
    means over the group, sums over the graded answers of all groups

A group's mean is taken off because the advantage does so: r is about what a step makes likelier, and a prompt
that is hard and long does not count. x is the number of tokens, the value of each part of the reward named
after form, and without such a part the number of MARKS in the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from unfreeze.report.rollouts.answers import Answer, num_tokens

ALARM = 0.8  # |r| above which reward and x are nearly one
LEAST = 32  # graded answers; by chance |r| > .8 has p < 1e-7 for 32 independent ones
WINDOW = 8  # steps whose sums are pooled; the first as many are what the reward rose from
RISE = 2.0  # standard errors of the difference of two means
BOUND = 1e100
LENGTH = "length"
MARKED = "marks of form"
MARKS = re.compile(r"\\boxed\{|</?(?:answer|think|solution)>|^#### |^```|\*\*|^final answer:", re.I | re.M)
OF_FORM = re.compile(r"format|\bform\b|style|syntax|tags?\b", re.IGNORECASE)

Products = tuple[int, float, float, float]
"""(answers, sum of dR dx, of dR dR, of dx dx), deviations from the means of their groups."""
NOTHING: Products = (0, 0.0, 0.0, 0.0)


def bounded(value: float) -> float:
    """The value between -BOUND and BOUND, so that squares and their sums stay finite."""
    return max(-BOUND, min(BOUND, value))


def values(answer: Answer) -> dict[str, float]:
    """Canary -> x of this answer; empty if it has no reward."""
    if answer.get("reward") is None:
        return {}
    parts = answer.get("parts", {}).items()
    forms = {name: bounded(part) for name, part in parts if part is not None and OF_FORM.search(name)}
    if not forms:
        forms = {MARKED: float(len(MARKS.findall(answer.get("text", ""))))}
    return {LENGTH: float(num_tokens(answer)), **forms}


def products(rewards: Sequence[float], xs: Sequence[float]) -> Products:
    """Products of one group."""
    count = len(rewards)
    dr, dx = ([value - sum(side) / count for value in side] for side in (rewards, xs))
    return count, _dot(dr, dx), _dot(dr, dr), _dot(dx, dx)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def pooled(several: Sequence[Products]) -> Products:
    """Sum over groups or steps."""
    return tuple(map(sum, zip(*several, strict=True))) if several else NOTHING  # type: ignore[return-value]


def correlation(sums: Products) -> float | None:
    """r, -1 to 1; None if either side is the same within every group."""
    _, cross, rewards, xs = sums
    scale = math.sqrt(rewards) * math.sqrt(xs)
    return max(-1.0, min(1.0, cross / scale)) if scale > 0 else None


class Mean(NamedTuple):
    """Count, sum and sum of squares of one quantity."""

    count: int
    total: float
    squares: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def error(self) -> float:
        """Variance of the mean, (E[R^2] - E[R]^2) / count."""
        return max(0.0, self.squares / self.count - self.mean * self.mean) / self.count


def rises(first: Mean, last: Mean) -> bool:
    """True if the second mean is higher by more than RISE standard errors."""
    if not first.count or not last.count:
        return False
    return last.mean - first.mean > RISE * math.sqrt(first.error + last.error)


def alarms(steps: Sequence[dict[str, Products]], rewards: Sequence[Mean]) -> list[str]:
    """One sentence for each canary with |r| > ALARM over the last WINDOW steps while the reward rises.

    steps: canary -> products, of each step. rewards: of each step.
    """
    window = min(WINDOW, len(steps) // 2)
    if not window:
        return []
    first, last = (Mean(*map(sum, zip(*part, strict=True))) for part in (rewards[:window], rewards[-window:]))
    if not rises(first, last):
        return []
    sentences = []
    for name in dict.fromkeys(name for step in steps[-window:] for name in step):
        sums = pooled([step[name] for step in steps[-window:] if name in step])
        r = correlation(sums)
        if r is not None and abs(r) > ALARM and sums[0] >= LEAST:
            sentences.append(
                f"The reward follows {name} (r = {r:+.2f} within groups, last {window:,} steps) and rises:"
                " read the best answers before you trust it."
            )
    return sentences
