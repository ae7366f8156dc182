"""The answer of a study: differences to the first arm, with intervals, and the sentence made from them.

Two runs with the same seed have the same data order and held-out rows, so arms are compared by seed. For n
seeds with differences d_s

    interval over seeds   mean d ± t(n - 1) · sd(d) / sqrt(n)              t: 97.5 % quantile of Student's t

Where runs keep their losses by held-out row, a second interval says how far other rows would move it: with
d_r the difference of row r, a mean over seeds, its standard error is ByRow.change's (evaluate/by_row.py).
The interval that is shown covers both, and what both make together: the rows' noise is shared by
all seeds, so it is in no difference between them,

    interval of both      mean d ± t(ν) · sqrt(s² + r²)       s, r: standard errors; ν: Welch-Satterthwaite's

validation_fraction holds other rows out for each seed: these are independent, and their noise is in s.
Each interval holds alone in 95 of 100 studies; a study with many arms has more chances to err.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

LEVEL = 0.975
EQUAL = {"flops": "at equal FLOPs", "active": "at equal active parameters", "none": ""}


@dataclass(frozen=True)
class Difference:
    """An arm minus the first one: mean and 95 % interval.

    by              what the interval covers
    error, degrees  standard error and its degrees of freedom
    """

    mean: float
    low: float
    high: float
    by: str
    error: float = 0.0
    degrees: float = 1.0

    @property
    def clear(self) -> bool:
        """True if the interval does not contain 0."""
        return self.low > 0 or self.high < 0


@cache
def t_quantile(degrees: float, level: float = LEVEL) -> float:
    """Return x with P(T <= x) = level >= 0.5 for Student's t, by bisection of its distribution.

    P(T <= x) = 1 - I(ν / (ν + x²); ν / 2, 1 / 2) / 2, I the regularised incomplete beta function
    (Abramowitz and Stegun 26.7.1, 26.5.8 for its continued fraction).
    """
    low, high = 0.0, 1.0
    while _t_below(high, degrees) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, degrees) < level else (low, middle)
    return (low + high) / 2


def _t_below(x: float, degrees: float) -> float:
    return 1 - _beta(degrees / (degrees + x * x), degrees / 2, 0.5) / 2


def _beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # its continued fraction, 1 / (1 + d1 / (1 + d2 / …)), from the back: 200 terms are exact to 1e-12 here
    fraction = 1.0
    for i in range(200, 0, -1):
        m = i // 2
        if i % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        fraction = 1 + term / fraction
    return front / (a * fraction)


def over_seeds(gaps: Sequence[float]) -> Difference:
    """Mean and interval of one difference per seed. Infinite for a single seed."""
    count = len(gaps)
    mean = math.fsum(gaps) / count
    if count < 2:
        return Difference(mean, -math.inf, math.inf, "seeds")
    spread = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (count - 1))
    error = spread / math.sqrt(count)
    reach = t_quantile(count - 1) * error
    return Difference(mean, mean - reach, mean + reach, "seeds", error, count - 1)


def over_rows(first: Sequence[Any], other: Sequence[Any]) -> Difference | None:
    """Mean and interval over held-out rows. A run's rows are [sums, counts]; one run per seed.

    If every seed holds out the same rows, each row's difference is its mean over seeds; else the seeds' rows
    are independent draws. None if two arms have other rows in a seed.
    """
    import numpy as np

    seeds = [np.array([*a, b[0]], dtype=float) for a, b in zip(first, other, strict=True) if a[1] == b[1]]
    if len(seeds) < len(first) or any((rows[1] > 0).sum() < 2 for rows in seeds):
        return None
    by = "rows of each seed"
    if all(np.array_equal(rows[1], seeds[0][1]) for rows in seeds):
        seeds, by = [np.mean(seeds, axis=0)], "rows"
    means: list[float] = []
    variances: list[float] = []
    degrees = 0
    for sums_R, counts_R, others_R in seeds:
        held = counts_R > 0
        gap_R, count_R = (others_R - sums_R)[held], counts_R[held]
        mean, rows = float(gap_R.sum() / count_R.sum()), len(count_R)
        spread = float(np.square(gap_R - mean * count_R).sum()) * rows / (rows - 1)
        means.append(mean)
        variances.append(spread / float(count_R.sum()) ** 2)
        degrees += rows - 1
    mean = math.fsum(means) / len(means)
    error = math.sqrt(math.fsum(variances)) / len(means)
    reach = t_quantile(degrees) * error
    return Difference(mean, mean - reach, mean + reach, by, error, degrees)


def difference(first: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Difference | None:
    """Return other - first; runs in the order of their seeds. None if a value is not finite."""
    pairs = [(a["value"], b["value"]) for a, b in zip(first, other, strict=True)]
    if not pairs or any(value is None or not math.isfinite(value) for pair in pairs for value in pair):
        return None
    seeds = over_seeds([b - a for a, b in pairs])
    if not all(run.get("rows") for run in (*first, *other)):
        return seeds
    rows = over_rows([run["rows"] for run in first], [run["rows"] for run in other])
    if rows is None:
        return seeds
    reach = together(seeds, rows) if rows.by == "rows" else 0.0
    low, high = min(seeds.low, rows.low, seeds.mean - reach), max(seeds.high, rows.high, seeds.mean + reach)
    return Difference(seeds.mean, low, high, "seeds and rows")


def together(seeds: Difference, rows: Difference) -> float:
    """Half the width of an interval over other seeds and other rows, by Welch and Satterthwaite."""
    s, r = seeds.error**2, rows.error**2
    if not s + r:
        return 0.0
    return t_quantile((s + r) ** 2 / (s**2 / seeds.degrees + r**2 / rows.degrees)) * math.sqrt(s + r)


def number(value: float) -> str:
    """Three significant digits, with a sign where it is negative."""
    words = f"{value:.3g}"
    return f"{value:.0f}" if "e" in words and abs(value) >= 1000 else words


def span(low: float, high: float) -> str:
    """Words such as '0.012 to 0.031'; one number if both ends print alike."""
    one, other = number(low), number(high)
    return one if one == other else f"{one} to {other}"


def sentence(
    arms: Sequence[str],
    gaps: Mapping[str, Difference | None],
    seeds: int,
    *,
    unit: str = "",
    equal: str = "none",
    failed: Mapping[str, int] | None = None,
) -> str:
    """Words of the answer. gaps: of each arm but the first. failed: arm -> runs without a finite value."""
    first, failed = arms[0], failed or {}
    clauses: list[str] = []
    same: list[str] = []
    of = f" {unit}" if unit else ""
    for arm in arms[1:]:
        gap = gaps[arm]
        if gap is None:
            continue
        if not gap.clear:
            same.append(f"{arm} minus {first} is {span(gap.low, gap.high)}{of}")
            continue
        side, ends = ("lower", (-gap.high, -gap.low)) if gap.high < 0 else ("higher", (gap.low, gap.high))
        clauses.append(f"{arm} is {side} than {first} by {span(*ends)}{of}")
    if same:
        clauses.append(f"no difference: {', '.join(same)}")
    clauses += [f"{arm} has no finite value in {count} of {seeds} seeds" for arm, count in failed.items()]
    where = f" {EQUAL[equal]}" if EQUAL[equal] else ""
    return f"{'; '.join(clauses)}{where} ({seeds} seeds)"


def ranking(arms: Sequence[str], gaps: Mapping[str, Difference | None], better: str) -> list[str]:
    """Arms, the best first; [] where two intervals overlap. The first arm's is the point 0."""
    ends: list[tuple[float, float, str]] = [(0.0, 0.0, arms[0])]
    for arm in arms[1:]:
        gap = gaps[arm]
        if gap is None:
            return []
        ends.append((gap.low, gap.high, arm))
    ends.sort()
    if any(one[1] >= next_one[0] for one, next_one in itertools.pairwise(ends)):
        return []
    names = [name for _, _, name in ends]
    return names if better == "lower" else names[::-1]
