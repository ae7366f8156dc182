"""Advantages of groups of answers: each formula by hand, answers without a reward, groups without a signal."""

from __future__ import annotations

import math

import pytest
import torch

from unfreeze.core.batch import Batch
from unfreeze.rollout.groups import Advantage, advantages, divided, next_average, rewards_of

REWARDS = rewards_of(
    [[1.0, 0.25, 0.0, 3.0], [0.5, None, 2.0, 0.5], [0.1, 0.1, 0.1, 0.1], [None, 4.0, None, None]]
)


def rows(found) -> list[list[float]]:
    return found.advantage_PG.tolist()


def close(values) -> object:
    return pytest.approx(values, abs=1e-12)


def test_the_mean_of_the_group_counts_graded_answers_only():
    found = advantages(REWARDS)
    assert rows(found)[0] == close([1 - 1.0625, 0.25 - 1.0625, -1.0625, 3 - 1.0625])
    assert rows(found)[1] == close([-0.5, 0.0, 1.0, -0.5])
    assert found.trained_PG[1].tolist() == [True, False, True, True]
    # control arm: counted as 0 the missing reward would move the others
    assert rows(advantages(rewards_of([[0.5, 0.0, 2.0, 0.5]])))[0] != close(rows(found)[1])


def test_groups_without_a_signal_are_named_and_exactly_zero():
    found = advantages(REWARDS, Advantage(scale="group", eps=1e-12))
    assert found.signal_P.tolist() == [True, True, False, False]
    assert found.equal_P.tolist() == [False, False, True, True]
    assert rows(found)[2] == [0.0] * 4 and rows(found)[3] == [0.0] * 4
    assert found.mean_P.tolist() == close([1.0625, 1.0, 0.1, 4.0])
    # (0.1 + 0.1 + 0.1) / 3 is not 0.1: rounding, divided by a spread of 0, must not become an advantage
    thrice = advantages(rewards_of([[0.1] * 3]), Advantage(scale="group", eps=1e-20))
    assert rows(thrice) == [[0.0] * 3] and not thrice.signal_P.any()


def test_leave_one_out_is_the_mean_of_the_others_with_their_spread():
    found = advantages(REWARDS, Advantage("leave-one-out", "group", eps=0.5))
    for group in (0, 1):
        graded = [reward for reward in REWARDS[group].tolist() if not math.isnan(reward)]
        wanted = []
        for place, reward in enumerate(graded):
            others = torch.tensor(graded[:place] + graded[place + 1 :], dtype=torch.float64)
            spread = float(others.std())
            wanted.append((reward - float(others.mean())) / (spread + 0.5 if spread else 1.0))
        values = [
            value for value, kept in zip(rows(found)[group], found.trained_PG[group], strict=True) if kept
        ]
        assert values == close(wanted)
    # one graded answer has no others
    assert rows(found)[3] == [0.0] * 4


def test_a_spread_of_zero_divides_by_nothing():
    """Two answers: the one other has no spread. NeMo-RL leaves such advantages as they are."""
    found = advantages(rewards_of([[1.0, 0.0]]), Advantage("leave-one-out", "group", eps=1e-6))
    assert rows(found) == [[1.0, -1.0]]


def test_the_spread_of_the_batch_is_over_all_graded_answers():
    found = advantages(REWARDS, Advantage(scale="batch", eps=0.1))
    graded = REWARDS[~REWARDS.isnan()]
    wanted = (1 - 1.0625) / (float(graded.std()) + 0.1)
    assert rows(found)[0][0] == close(wanted)


def test_a_moving_average_of_earlier_steps():
    settings = Advantage("ema", decay=0.75)
    first = next_average(None, REWARDS, settings.decay)
    assert first == close(float(REWARDS.nanmean()))
    assert rows(advantages(REWARDS, settings))[3] == close([0, 4 - first, 0, 0])
    found = advantages(REWARDS, settings, average=0.2)
    assert (
        rows(found)[2] == close([-0.1] * 4) and found.signal_P[2]
    )  # equal rewards below the average do teach
    assert next_average(2.0, REWARDS, 0.75) == close(1.5 + 0.25 * first)
    assert next_average(2.0, rewards_of([[None]]), 0.75) == 2.0


def test_the_reward_of_the_greedy_answer():
    greedy_P = torch.tensor([0.25, math.nan, 0.1, 1.0], dtype=torch.float64)
    found = advantages(REWARDS, Advantage("greedy"), greedy_P=greedy_P)
    assert rows(found)[0] == close([0.75, 0.0, -0.25, 2.75]) and rows(found)[3] == close([0, 3.0, 0, 0])
    # a group whose greedy answer has no reward has no baseline
    assert rows(found)[1] == [0.0] * 4 and not found.trained_PG[1].any()
    with pytest.raises(ValueError, match="greedy"):
        advantages(REWARDS, Advantage("greedy"))


def test_no_group_or_no_reward_at_all_is_no_error():
    assert advantages(rewards_of([])).advantage_PG.shape == (0, 1)
    for scale in ("group", "batch", "none"):
        found = advantages(rewards_of([[None, None]]), Advantage(scale=scale))
        assert rows(found) == [[0.0, 0.0]] and not found.trained_PG.any() and not found.equal_P.any()


def test_the_divisor_stands_once_in_a_step():
    one = torch.ones(4)
    batch = Batch(one.long(), one.long(), one, one.long(), torch.tensor([0]))
    for per, count in (("tokens", 40), ("answers", 10), ("constant", 10), ("sum", 1)):
        assert sum(each.count for each in divided([batch] * 3, per, answers=10, tokens=40)) == count
