"""Held-out rewards: means over graded answers, and their interval."""

import numpy as np

from unfreeze.evaluate.rewarded import interval, means_of

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
