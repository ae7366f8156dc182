"""Held-out rewards: means over graded answers, and their interval."""

from itertools import combinations

import numpy as np
import pytest

from unfreeze.data.store.examples import Example
from unfreeze.evaluate.rewarded import Asking, Rewarded, interval, means_of, passes_of, rewarded

NAN = float("nan")


def test_an_answer_without_a_reward_is_no_answer_with_reward_0():
    rewards = np.array([[-8.0, NAN], [-6.0, -4.0], [NAN, NAN]])
    assert means_of(rewards, np.arange(len(rewards))).tolist() == [
        -8.0,
        -5.0,
        -6.5,
    ]  # the last prompt takes the mean of the others
    assert means_of(np.array([[NAN]]), np.arange(1)).tolist() == [0.0]


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
    passes = passes_of(rewards, np.arange(len(rewards)))
    assert list(passes) == [1, 2, 4]
    for k, values in passes.items():
        graded = [[reward for reward in row if reward == reward] for row in rewards.tolist()]
        wanted = [
            np.mean([any(reward >= 1 for reward in chosen) for chosen in combinations(row, k)])
            for row in graded
            if len(row) >= k
        ]
        assert values == pytest.approx(wanted, abs=1e-12)
    assert (
        list(passes_of(rewards[:, :3], np.arange(40))) == [1, 2]
        and passes_of(np.array([[NAN]]), np.arange(1)) == {}
    )


def test_the_scores_have_pass_at_k_with_its_interval():
    rewards = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]] * 20)
    scores = Rewarded(
        means_of(rewards, np.arange(len(rewards))),
        rewards.max(1),
        10,
        60,
        0,
        passes_of(rewards, np.arange(len(rewards))),
    ).scores
    assert scores["pass_1"] == 0.5 and scores["pass_2"] == scores["solved"] == pytest.approx(2 / 3)
    assert "pass_4" not in scores
    assert (scores["pass_1_low"], scores["pass_1_high"]) == interval(rewards.mean(1))


def scores_of(copies: int, prompts: int = 12) -> Rewarded:
    """Of `prompts` prompts, `copies` of each, whose answers are worth the same in each copy but for noise."""
    examples = [
        Example([1, 2], [0.0, 1.0], row=place, digest=bytes([1 + place % prompts] * 16))
        for place in range(copies * prompts)
    ]
    worth = np.random.default_rng(3).normal(0.5, 0.5, prompts)
    noise = np.random.default_rng(4)

    def answer(asked, each):
        return [
            (worth[example.row % prompts] + noise.normal(0, 0.01), 3)
            for example, _ in asked
            for _ in range(each)
        ]

    return rewarded(examples, answer, Asking(4, 0, 0.0))


def test_copies_of_a_prompt_are_one_prompt():
    """They give more answers, not more prompts: neither the rows nor the interval pretend otherwise."""
    once, often = scores_of(1), scores_of(40)
    assert once.by_row.rows == often.by_row.rows == 12
    one, many = once.scores, often.scores
    for name in (
        "reward",
        "reward_low",
        "reward_high",
        "pass_1",
        "pass_1_low",
        "pass_1_high",
        "solved",
        "length",
    ):
        assert many[name] == pytest.approx(one[name], abs=0.05)
    assert many["reward_high"] - many["reward_low"] > 0.4
    alone = scores_of(40, 1)
    assert alone.scores["reward_low"] is alone.scores["pass_1_high"] is None
    assert alone.by_row.rows == 1 and alone.by_row.change(scores_of(40, 1).by_row, "reward") == (0.0, None)


def test_answers_without_a_reward_are_missing_from_their_prompt_only():
    rewards = np.array([[1.0, NAN], [NAN, NAN], [0.0, 0.0], [NAN, NAN]])
    row = np.array([0, 0, 1, 2])
    assert means_of(rewards, row).tolist() == [1.0, 0.0, 0.5]
    passes = passes_of(rewards, row)
    assert passes[1].tolist() == [1.0, 0.0] and passes[2].tolist() == [0.0]
