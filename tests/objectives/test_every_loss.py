"""Claims about every file of objectives/: its loss is a SUM over the supervised tokens, and its count is their
weight. Then accumulation, packing and processes change nothing, whatever the loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from unfreeze.core.batch import Batch, Loss

T, D, V = 24, 8, 31
STARTS = (0, 5, 12, 18)
FOLDER = Path(__file__).resolve().parents[2] / "src" / "unfreeze" / "objectives"
FILES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
# left out: preference (a sum over pairs), intermediate (needs hidden layers), policy (needs advantages), log_p and
# ratios (no loss), following and balanced (need taps); each has its own tests
OF_TOKENS = [
    file
    for file in FILES
    if file not in ("preference", "intermediate", "policy", "log_p", "ratios", "following", "balanced")
]
Objective = Callable[[Tensor, nn.Module, Batch], Loss]


def teacher(batch: Batch) -> Callable[[slice, Tensor], Tensor]:
    """One that finds every word as likely."""
    return lambda rows, log_p_BV: torch.zeros_like(log_p_BV).log_softmax(-1)


ARGUMENTS = {
    "corrector": {"teacher": teacher, "gamma": 0.7},
    "divergence": {"teacher": teacher, "beta": 0.5, "temperature": 2.0, "alpha": 0.3},
}
"""File -> what else its function takes."""


def objective(file: str) -> Objective:
    """The function that bears the file's name."""
    found = getattr(importlib.import_module(f"unfreeze.objectives.{file}"), file, None)
    assert found, f"objectives/{file}.py has no function {file}(hidden_TD, lm_head, batch) -> Loss"
    return partial(found, **ARGUMENTS.get(file, {}))


def whole() -> tuple[Tensor, nn.Linear, Batch]:
    """Four documents; a part of their tokens is supervised, with uneven weights."""
    torch.manual_seed(0)
    weights = (torch.rand(T) < 0.6) * (0.5 + torch.rand(T))
    positions = torch.cat([torch.arange(b - a) for a, b in zip(STARTS, (*STARTS[1:], T), strict=True)])
    tokens, targets = torch.randint(0, V, (2, T))
    batch = Batch(tokens, targets, weights.float(), positions, torch.tensor(STARTS))
    return torch.randn(T, D), nn.Linear(D, V, bias=False), batch


def part(batch: Batch, first: int, end: int) -> Batch:
    """Documents first … end - 1."""
    a, b = STARTS[first], (*STARTS, T)[end]
    cut = {name: getattr(batch, name)[a:b] for name in ("tokens_T", "targets_T", "weights_T", "positions_T")}
    return Batch(**cut, starts_S=batch.starts_S[first:end] - a)


@torch.no_grad()
def faults(loss: Objective) -> list[str]:
    """What of `loss` is no weighted sum with its count; rtol 1e-5: float32 sums of 24 terms."""
    hidden, head, batch = whole()
    both, count = loss(hidden, head, batch), float(batch.weights_T.double().sum())
    halves = [
        loss(hidden[: STARTS[2]], head, part(batch, 0, 2)),
        loss(hidden[STARTS[2] :], head, part(batch, 2, 4)),
    ]
    doubled = loss(hidden, head, replace(batch, weights_T=2 * batch.weights_T, nonzero=None))
    claims = {
        f"count is {float(both.count):g}, the weights sum to {count:g}": (float(both.count), count),
        "sum of the whole is not the sum of its two halves": (
            float(both.sum),
            float(halves[0].sum) + float(halves[1].sum),
        ),
        "twice the weights do not give twice the sum": (float(doubled.sum), 2 * float(both.sum)),
    }
    return [words for words, (got, expected) in claims.items() if got != pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("file", OF_TOKENS)
def test_it_is_a_weighted_sum_with_its_count(file: str):
    bad = faults(objective(file))
    assert not bad, (
        f"objectives/{file}.py: {'; '.join(bad)}. Return Loss(sum=Σ_t w_t·loss_t, count=Σ_t w_t) with w ="
        " batch.weights_T, never a mean: the step divides once, by the count of all micro-batches and processes"
    )


def test_control_arm_means_and_forgotten_weights_are_seen():
    def mean(hidden: Tensor, head: nn.Module, batch: Batch) -> Loss:
        losses = nn.functional.cross_entropy(head(hidden), batch.targets_T, reduction="none")
        count = batch.weights_T.sum()
        return Loss((losses * batch.weights_T).sum() / count, count, {})

    def unweighted(hidden: Tensor, head: nn.Module, batch: Batch) -> Loss:
        losses = nn.functional.cross_entropy(head(hidden), batch.targets_T, reduction="none")
        rows = batch.weights_T > 0
        return Loss(losses[rows].sum(), rows.sum(), {})

    assert [words[:5] for words in faults(mean)] == ["sum o", "twice"]
    assert [words[:5] for words in faults(unweighted)] == ["count", "twice"]


@pytest.mark.parametrize("file", FILES)
def test_it_has_a_test_of_its_own(file: str):
    there = Path(__file__).with_name(f"test_{file}.py").is_file()
    assert there, f"write tests/objectives/test_{file}.py: value and gradients equal to float64 torch"
