"""Losses and corrections of single tokens: the numbers that other trainers' own tests print, and corrections by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.objectives.ratios import KL, LOSSES, Answers, Bounds, Correction, Tokens


def answers(*lengths: int) -> Answers:
    sizes, total = torch.tensor(lengths), sum(lengths)
    zeros = torch.zeros(total, dtype=torch.int64)
    return Answers(Batch(zeros, zeros, torch.ones(total), zeros, sizes.cumsum(0) - sizes))


def losses(
    kind: str, ratios: list[float], advantages: list[float], bounds: Bounds, log_p: Tensor | None = None
):
    now = torch.full((len(ratios),), -1.0).double() if log_p is None else log_p.double()
    before = now - torch.tensor(ratios, dtype=torch.float64).log()
    tokens = Tokens(now, before, torch.tensor(advantages, dtype=torch.float64), answers(len(ratios)))
    return LOSSES[kind](tokens, bounds)


def test_slimes_own_numbers_of_a_dual_limit():
    """slime, tests/test_policy_loss.py."""
    found, _ = losses("ppo", [2.0, 2.0, 0.5], [2.0, -2.0, 2.0], Bounds(0.2, 0.2, dual=1.5))
    assert found.tolist() == pytest.approx([-2.4, 3.0, -1.0], abs=1e-12)
    # control arm: without the limit the second is 4
    assert losses("ppo", [2.0, 2.0, 0.5], [2.0, -2.0, 2.0], Bounds())[0].tolist() != pytest.approx(
        [-2.4, 3.0, -1.0]
    )


@pytest.mark.parametrize(
    ("low", "high", "ratios", "clamped"),
    [
        (0.2, 0.28, [1.0, 1.14, 1.56, 0.4], [1.0, 1.14, 1.28, 0.8]),
        (1.0, 4.0, [1.0, 3.0, 9.0, 0.4], [1.0, 3.0, 5.0, 0.4]),
    ],
)
def test_slimes_own_numbers_of_cispo(low, high, ratios, clamped):
    """slime, tests/test_cispo_loss.py."""
    advantages, log_p = [1.0, -0.5, 2.0, -1.0], torch.tensor([-0.7, -1.2, -0.4, -2.1])
    found, cut = losses("cispo", ratios, advantages, Bounds(low, high), log_p)
    wanted = -torch.tensor(clamped) * torch.tensor(advantages) * log_p
    torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=1e-6)
    exact = [a == pytest.approx(b, abs=1e-9) for a, b in zip(ratios, clamped, strict=True)]
    assert cut.tolist()[2] is True and [not each for each in cut.tolist()][2:] == exact[2:]


def test_nemos_own_number_of_clipped_ratios():
    """NeMo-RL, tests/unit/algorithms/test_loss_functions.py: advantages 1, -1, 2 at ratios .5, 1, 1.5."""
    found, _ = losses("ppo", [0.5, 1.0, 1.5], [1.0, -1.0, 2.0], Bounds())
    assert float(found.mean()) == pytest.approx(-0.6333, abs=5e-5)


@pytest.mark.parametrize(
    ("correction", "wanted"),
    [
        (Correction(), [1.0, 1.0, 1.0, 1.0]),
        (Correction("token", cap=1.5), [1.25, 1.5, 0.5, 1.0]),
        (Correction("answer", cap=2.0), [2.0, 2.0, 0.5, 0.5]),
        (Correction(mask="token", band=(0.6, 1.6)), [1.0, 0.0, 0.0, 1.0]),
        (Correction(mask="answer", band=(0.6, 1.5)), [0.0, 0.0, 1.0, 1.0]),
        (Correction("token", 10.0, "token", (0.6, 1.6)), [1.25, 0.0, 0.0, 1.0]),  # IcePop
    ],
)
def test_corrections_by_hand(correction, wanted):
    """Two answers of two tokens, sampled with ratios 1.25, 2 and 0.5, 1: products 2.5, 0.5; means 1.58, 0.71."""
    drift = torch.tensor([1.25, 2.0, 0.5, 1.0], dtype=torch.float64).log()
    found = correction.weights(drift, answers(2, 2))
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)


def test_estimators_of_one_token():
    """log p -1, log ref -1.5: k1 0.5, k2 0.125, k3 e^-0.5 - 1 + 0.5."""
    log_p = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5], dtype=torch.float64)
    k3 = math.exp(-0.5) - 0.5
    wanted = {"k1": (0.5, 0.5), "k2": (0.125, 0.5), "k3": (k3, 1 - math.exp(-0.5)), "k3+": (k3, 0.5)}
    for name, (value, slope) in wanted.items():
        found = KL[name](log_p, reference)
        (gradient,) = torch.autograd.grad(found.sum(), log_p)
        assert (float(found.detach()), float(gradient)) == pytest.approx((value, slope), abs=1e-12), name
