"""The share of the adapter's gain that a merged model keeps, on held-out rows.

share = (loss of base − loss of merged) / (loss of base − loss of base with adapter)

or the same of rewards, of which more is better.

1: the merged model is as good as the base with its adapter beside it. 0: it is as good as the base, so
rounding lost the whole gain. Below 0: the merged model is worse than the base.

It is undefined if there is no gain, or if the gain may be chance: fewer than three rows, or a gain within
`errors` standard errors of the difference, paired by row (Student's t: 4.5 for three rows, 2 for many).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from unfreeze.core.units import plural
from unfreeze.report.learnt import errors

ENOUGH = 0.9  # warn about a smaller share


@dataclass(frozen=True)
class Gain:
    """Held-out losses, all on the same `tokens` of `rows` distinct rows.

    loss   for pairs and labels the loss of `unfreeze prefer` ("dpo, beta 0.1"), a mean over rows; "" for
           sft
           rows: cross entropy in nats per token
    error  standard error of base − adapter
    """

    figure: ClassVar[str] = "loss"
    unit: ClassVar[str] = "row"

    base: float
    adapter: float
    merged: float
    tokens: int
    rows: int
    error: float = 0.0
    loss: str = ""

    @property
    def gained(self) -> float:
        return self.better(self.adapter)

    @property
    def share(self) -> float | None:
        """The share; None if there is no gain to take a share of (see `undefined`)."""
        return None if self.undefined else self.better(self.merged) / self.gained

    def better(self, than_base: float) -> float:
        """Return by how much this figure is better than the base's."""
        return self.base - than_base

    @property
    def undefined(self) -> str:
        """The reason why there is no share; "" if there is one."""
        if not all(map(math.isfinite, (self.base, self.adapter, self.merged))):
            return f"a {self.figure} is not a finite number"
        if self.gained <= 0:
            return (
                f"the adapter is no better than the base on these {self.unit}s, so there is no gain to keep"
            )
        if self.rows < 2:
            return f"1 {self.unit} is too few to measure on"
        if self.gained <= errors(self.rows - 1) * self.error:
            figures = f"{self.gained:.2g} with a standard error of {self.error:.2g}"
            return (
                f"the adapter's gain on these {self.unit}s ({figures}) may be chance, so a share of it means"
                " nothing"
            )
        return ""

    @property
    def survives(self) -> str:
        """'64.5 % of what was learned survives', or the reason why the share is unknown."""
        if self.share is None:
            return f"how much of what was learned survives is unknown: {self.undefined}"
        if self.share <= 0:
            return "nothing of what was learned survives"
        more = " (more than the adapter gained: rounding happened to help here)" if self.share > 1.05 else ""
        return f"{math.floor(1000 * self.share + 1e-6) / 10:g} % of what was learned survives{more}"

    def words(self, file: str = "") -> str:
        """Return the figures in one line. file: source of the rows, "" for those that the run held out."""
        kind = f" ({self.loss})" if self.loss else ""
        on = f"{self.figure}{kind} on {file}," if file else f"held-out {self.figure}{kind} on"
        rows = plural(self.rows, self.unit)
        losses = f"base {self.base:.3f}, with adapter {self.adapter:.3f}, merged {self.merged:.3f}"
        return f"{on} {rows}: {losses}"


@dataclass(frozen=True)
class RewardGain(Gain):
    """Mean rewards of answers to held-out prompts; more is better. tokens: sampled with the adapter."""

    figure: ClassVar[str] = "reward"
    unit: ClassVar[str] = "prompt"

    def better(self, than_base: float) -> float:
        """Return by how much this reward is above the base's."""
        return than_base - self.base


def error_of(differences: Sequence[float], weights: Sequence[float]) -> float:
    """Return the standard error of Σ d / Σ w over n rows, from the spread of the rows; inf for one row.

    √(n / (n − 1) · Σ (d − m w)²) / Σ w with m = Σ d / Σ w: the ratio estimator (Cochran 1977, 6.4). If every
    w is 1 it is the standard error of a mean.
    """
    count, total = len(differences), sum(weights)
    if count < 2:
        return math.inf
    mean = sum(differences) / total
    square = sum((d - mean * w) ** 2 for d, w in zip(differences, weights, strict=True))
    return math.sqrt(count / (count - 1) * square) / total
