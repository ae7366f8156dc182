"""Rewards of held-out prompts: k answers to each, with the same seeds at every validation.

    avg@k   mean reward of all answers
    pass@k  chance that one of k answers to a prompt has a reward of at least 1: 1 - C(n - c, k) / C(n, k)
            of n graded answers with c such rewards, unbiased (Chen et al. 2021, arXiv:2107.03374)
    solved  share of prompts with such an answer among all of theirs

Intervals draw prompts with replacement (bootstrap.py). Prompts of equal content count as one, with the
answers to all of them. Answers that were cut are graded like others: a model that never ends does not look
better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb

import numpy as np

from unfreeze.core.errors import ConfigError
from unfreeze.data.packing.split import distinct_rows
from unfreeze.data.store.examples import Example, Examples
from unfreeze.evaluate import bootstrap
from unfreeze.evaluate.by_row import ByRow

Key = tuple[int, ...]
"""Numbers that the seeds of a prompt's answers are made of."""
Answer = Callable[[Sequence[tuple[Example, Key]], int], Sequence[tuple[float | None, int]]]
"""(prompts, k) -> reward and tokens of k answers to each, in order; None: without a reward."""

PASSES = (1, 2, 4)
"""k of pass@k, as far as there are as many answers."""
SOLVED = 1.0
HELD_OUT = 2**32 - 1
"""In place of a step's number in the seeds of held-out answers."""


@dataclass(frozen=True)
class Asking:
    """Sampling of held-out answers.

    answers   to each prompt
    failing   largest share without a reward
    """

    answers: int
    seed: int
    failing: float


@dataclass(frozen=True)
class Rewarded:
    """mean, solved: per distinct prompt [R]. loss: minus the mean reward; the lowest is the best save.

    tokens  of one answer to each document, on average
    passes  k -> pass@k of the prompts with at least k graded answers
    """

    mean_R: np.ndarray
    solved_R: np.ndarray
    tokens: int
    documents: int
    failed: int
    passes: Mapping[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])

    @property
    def loss(self) -> float:
        return -float(self.mean_R.mean())

    @property
    def scores(self) -> dict[str, float | None]:
        low, high = interval(self.mean_R)
        passes: dict[str, float | None] = {}
        for k, values_R in self.passes.items():
            name, ends = f"pass_{k}", interval(values_R)
            passes |= {name: float(values_R.mean()), f"{name}_low": ends[0], f"{name}_high": ends[1]}
        return {
            "loss": self.loss,
            "reward": -self.loss,
            "reward_low": low,
            "reward_high": high,
            **passes,
            "solved": float(self.solved_R.mean()),
            "length": self.tokens / max(1, self.documents),
            "failed": float(self.failed),
        }

    @property
    def by_row(self) -> ByRow:
        ones = np.ones(len(self.mean_R), dtype=np.float32)
        values = {"loss": -self.mean_R, "reward": self.mean_R, "solved": self.solved_R}
        return ByRow({name: (each.astype(np.float32), ones) for name, each in values.items()})


def interval(values_R: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """Return the 95 % interval of the mean (bootstrap.py); None for a single prompt, which has no spread."""
    if len(values_R) < 2:
        return None, None
    one = bootstrap.interval(bootstrap.items_of(values_R))
    return one.low, one.high


def rewarded(examples: Sequence[Example], answer: Answer, asking: Asking) -> Rewarded:
    """Answer and grade all held-out prompts.

    Raises ConfigError if more than a share `asking.failing` of the answers has no reward.
    """
    answers = asking.answers
    every = answer(
        [(example, (asking.seed, HELD_OUT, place)) for place, example in enumerate(examples)], answers
    )
    grades = np.array([np.nan if reward is None else reward for reward, _ in every], dtype=np.float64)
    failed = int(np.isnan(grades).sum())
    if failed > asking.failing * len(grades):
        raise ConfigError(
            f"{failed} of {len(grades)} answers to held-out prompts have no reward, more than"
            f" {asking.failing:.0%}",
            next="unfreeze reward show my.py --data HELD_OUT shows the messages",
        )
    rewards_NK = grades.reshape(len(examples), answers)
    row_N = distinct_rows(Examples.of(examples))
    tokens = sum(length for _, length in every) // answers
    solved_R = averages((rewards_NK >= SOLVED).max(1), row_N)
    passes = passes_of(rewards_NK, row_N)
    return Rewarded(means_of(rewards_NK, row_N), solved_R, tokens, len(examples), failed, passes)


def averages(values_N: np.ndarray, row_N: np.ndarray) -> np.ndarray:
    """Return the mean of each row's values, for the rows that have any, in order."""
    _, place_N = np.unique(row_N, return_inverse=True)
    return np.bincount(place_N, values_N) / np.bincount(place_N)


def passes_of(rewards_NK: np.ndarray, row_N: np.ndarray) -> dict[int, np.ndarray]:
    """Return k -> pass@k of each row that has a document with at least k graded answers (not NaN).

    It is the mean over such documents. A k without any is left out.
    """
    graded_N, solved_N = (~np.isnan(rewards_NK)).sum(1), (rewards_NK >= SOLVED).sum(1)
    passes: dict[int, np.ndarray] = {}
    for k in PASSES:
        if (enough_N := graded_N >= k).any():
            counts = zip(graded_N[enough_N].tolist(), solved_N[enough_N].tolist(), strict=True)
            values = np.array([1 - comb(n - c, k) / comb(n, k) for n, c in counts])
            passes[k] = averages(values, row_N[enough_N])
    return passes


def means_of(rewards_NK: np.ndarray, row_N: np.ndarray) -> np.ndarray:
    """Return the mean reward of each row over the graded answers (not NaN) to its documents.

    A row without any takes the mean of the others: it moves neither the mean nor a comparison.
    """
    count_R = np.bincount(row_N, (~np.isnan(rewards_NK)).sum(1))
    mean_R = np.bincount(row_N, np.nan_to_num(rewards_NK).sum(1)) / np.maximum(count_R, 1)
    return np.where(count_R > 0, mean_R, mean_R[count_R > 0].mean() if count_R.any() else 0.0)
