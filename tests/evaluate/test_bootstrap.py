"""Intervals of scores: scipy's paired bootstrap gives the same, and they hold the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from unfreeze.evaluate.bootstrap import DRAWS, Interval, difference, interval, items_of, tail


def of_scipy(statistic, *samples, paired):
    return stats.bootstrap(
        samples, statistic, paired=paired, n_resamples=20_000, method="percentile", rng=1, vectorized=True
    ).confidence_interval


def close(ours: Interval, theirs, spread: float) -> bool:
    """2,000 and 20,000 draws: an end has an error of about 0.05 of the spread."""
    return abs(ours.low - theirs.low) < 0.15 * spread and abs(ours.high - theirs.high) < 0.15 * spread


@pytest.fixture(scope="module")
def pairs():
    draw = np.random.default_rng(1)
    before = draw.normal(2.0, 3.0, 200)
    return before, before + draw.normal(0.1, 0.5, 200), draw.uniform(1, 9, 200)


def test_the_interval_of_a_mean_is_scipys(pairs):
    ours = interval(items_of(pairs[0]))
    theirs = of_scipy(np.mean, pairs[0], paired=False)
    assert ours.value == pytest.approx(pairs[0].mean()) and close(ours, theirs, 3 / 200**0.5)


def test_the_paired_interval_is_scipys_and_much_narrower_than_an_unpaired_one(pairs):
    before, after, _ = pairs
    ours = difference(items_of(before), items_of(after))

    def gap(before, after, axis):
        return after.mean(axis) - before.mean(axis)

    assert close(ours, of_scipy(gap, before, after, paired=True), 0.5 / 200**0.5)
    # control arm: without pairs the difficulty of the items drowns the difference
    theirs = of_scipy(gap, before, after, paired=False)
    assert theirs.high - theirs.low > 5 * (ours.high - ours.low) and not close(ours, theirs, 0.5 / 200**0.5)


def test_weights_and_exponents_are_scipys(pairs):
    """A perplexity: exp(Σ nats / Σ tokens), drawn by item."""
    before, after, weights = pairs
    values = [each / 10 for each in (before, after)]
    items = [items_of(each, weights, exponent=True) for each in values]

    def perplexities(one, other, weight, axis):
        return np.exp((other * weight).sum(axis) / weight.sum(axis)) - np.exp(
            (one * weight).sum(axis) / weight.sum(axis)
        )

    ours = difference(*items)
    theirs = of_scipy(perplexities, *values, weights, paired=True)
    assert ours.value == pytest.approx(perplexities(*values, weights, axis=0))
    assert close(ours, theirs, (theirs.high - theirs.low) / 4)
    plain = difference(*(items_of(each, weights) for each in values))
    assert not close(plain, theirs, (theirs.high - theirs.low) / 4)  # control arm: no exponent


@pytest.mark.parametrize("items", [10, 30])
def test_of_few_items_too_an_interval_holds_the_truth_in_95_of_100_cases(items, monkeypatch):
    def share_of_100():
        draw, holds = np.random.default_rng(2), 0
        for number in range(400):
            before = draw.normal(size=items)
            one, other = items_of(before), items_of(before + draw.normal(size=items))
            holds += difference(one, other, draws=500, seed=number).holds_zero
        return holds / 4

    ours = share_of_100()  # its standard error is 1.1
    assert 93 < ours < 98
    monkeypatch.setattr("unfreeze.evaluate.bootstrap.tail", lambda items: 0.025)  # control arm
    assert share_of_100() < (ours - 2 if items == 10 else ours)


def test_the_tails_are_those_of_students_t():
    for items, within in ((10, 0.002), (20, 1e-4), (100, 1e-6)):
        t = stats.t.ppf(0.975, items - 1) * (items / (items - 1)) ** 0.5
        assert tail(items) == pytest.approx(stats.norm.cdf(-t), rel=within)
    assert tail(1) == 0.0 and tail(10**6) == pytest.approx(0.025, rel=1e-4)


def test_it_is_a_function_of_the_seed_and_takes_many_items_in_parts(monkeypatch):
    values = items_of(np.random.default_rng(3).normal(size=300))
    whole = interval(values)
    assert interval(values) == whole != interval(values, seed=1) and DRAWS == 2000
    monkeypatch.setattr("unfreeze.evaluate.bootstrap.AT_ONCE", 10_000)
    assert interval(values).low == pytest.approx(whole.low, abs=1e-12)


def test_equal_scores_differ_by_0_exactly():
    one = items_of([0.0, 1.0, 1.0, 0.3])
    assert difference(one, one) == Interval(0.0, 0.0, 0.0) and difference(one, one).holds_zero
    with pytest.raises(ValueError, match="not pairs"):
        difference(one, items_of([1.0]))
