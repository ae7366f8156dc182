"""Held-out rewards: means over graded answers, and their interval."""

from itertools import combinations

import numpy as np
import pytest

from unfreeze.evaluate.rewarded import Rewarded, interval, means_of, passes_of

NAN = float("nan")


def test_an_answer_without_a_reward_is_no_answer_with_reward_0():
    rewards = np.array([[-8.0, NAN], [-6.0, -4.0], [NAN, NAN]])
    assert means_of(rewards).tolist() == [-8.0, -5.0, -6.5]  # the last prompt takes the mean of the others
    assert means_of(np.array([[NAN]])).tolist() == [0.0]


def test_the_interval_is_that_of_the_mean():
    """For many draws the bootstrap's interval is ± 1.96 standard errors."""
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = interval(values)
    error = 1.96 * values.std() / 20
    assert abs(low - (values.mean() - error)) < 0.05 and abs(high - (values.mean() + error)) < 0.05
    assert interval(values) == (low, high)


def test_pass_at_k_is_the_share_of_all_subsets_with_a_solution():
    """Enumerated: every choice of k of a prompt's graded answers."""
    rewards = np.random.default_rng(2).choice([0.0, 0.5, 1.0, 1.5, NAN], (40, 6), p=[0.4, 0.2, 0.1, 0.1, 0.2])
    passes = passes_of(rewards)
    assert list(passes) == [1, 2, 4]
    for k, values in passes.items():
        graded = [[reward for reward in row if reward == reward] for row in rewards.tolist()]
        wanted = [
            np.mean([any(reward >= 1 for reward in chosen) for chosen in combinations(row, k)])
            for row in graded
            if len(row) >= k
        ]
        assert values == pytest.approx(wanted, abs=1e-12)
    assert list(passes_of(rewards[:, :3])) == [1, 2] and passes_of(np.array([[NAN]])) == {}


def test_the_scores_have_pass_at_k_with_its_interval():
    rewards = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]] * 20)
    scores = Rewarded(means_of(rewards), rewards.max(1), 10, 0, passes_of(rewards)).scores
    assert scores["pass_1"] == 0.5 and scores["pass_2"] == scores["solved"] == pytest.approx(2 / 3)
    assert "pass_4" not in scores
    assert (scores["pass_1_low"], scores["pass_1_high"]) == interval(rewards.mean(1))
