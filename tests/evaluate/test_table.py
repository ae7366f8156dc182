"""Scores become a table: pairs by item, verdicts, grids."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.evaluate.table import change, measure_record, same_measures
from unfreeze.evaluate.tasks import Scores

ITEMS = [f"row {n}" for n in range(40)]
DRAWN = np.random.default_rng(0).uniform(size=40).tolist()


def scores(values, **fields):
    return Scores("exact", ITEMS[: len(values)], values, **fields)


def verdict_of(before, after):
    return change(before, after, draws=500, seed=0)["verdict"]


def test_equal_scores_are_no_difference():
    one = change(scores(DRAWN), scores(DRAWN), draws=500, seed=0)
    assert one == {"items": 40, "value": 0.0, "low": 0.0, "high": 0.0, "verdict": "no difference"}


def test_a_difference_has_a_direction_and_noise_has_none():
    up = [value + 0.2 for value in DRAWN]
    noise = (np.array(DRAWN) + np.random.default_rng(1).normal(size=40)).tolist()
    assert verdict_of(scores(DRAWN), scores(up)) == "better"  # control arm of the one above
    assert verdict_of(scores(up), scores(DRAWN)) == "worse"
    assert verdict_of(scores(DRAWN), scores(noise)) == "no difference"
    losses = [scores(each, higher_is_better=False) for each in (DRAWN, up)]
    assert verdict_of(*losses) == "worse" and verdict_of(*losses[::-1]) == "better"


def test_few_items_say_nothing_and_none_in_common_neither():
    assert verdict_of(scores([0.0] * 5), scores([1.0] * 5)) == "too few items (5)"
    other = replace(scores(DRAWN), items=[f"other {n}" for n in range(40)])
    assert change(scores(DRAWN), other, draws=500, seed=0) == {"items": 0, "verdict": "no item in common"}
    theirs = scores(DRAWN, basis="another tokenizer")
    assert verdict_of(scores(DRAWN), theirs) == "not comparable: other tokens"


def test_copies_of_an_item_count_once():
    """40 items of which 37 are one: as sure as 4 items, and the score is the mean over all."""
    same = [*("same" for _ in range(37)), "a", "b", "c"]
    before, after = [0.0] * 40, [*[1.0] * 38, 0.0, 0.0]
    assert verdict_of(scores(before), scores(after)) == "better"  # control arm: contents not known
    one, other = (scores(each, contents=same) for each in (before, after))
    assert verdict_of(one, other) == "too few items (4)"
    record = measure_record("t", {"a": one, "b": other}, [("a", "b")], draws=500, seed=0)
    assert record["changes"][0]["value"] == pytest.approx(38 / 40) and record["changes"][0]["items"] == 40
    assert record["notes"][0] == "a: of 40 items only 4 differ: intervals count copies as one"
    apart = [f"{n}" for n in range(40)]
    known = change(scores(DRAWN), scores(after, contents=apart), draws=500, seed=0)
    assert known == change(scores(DRAWN), scores(after), draws=500, seed=0)


def test_items_are_paired_by_name_and_those_without_a_value_are_left_out():
    before = scores([None, *DRAWN[1:39], math.nan])
    order = list(reversed(range(40)))
    after = Scores("exact", [ITEMS[i] for i in order], [DRAWN[i] + 0.5 for i in order])
    one = change(before, after, draws=500, seed=0)
    assert one["items"] == 38 and one["value"] == pytest.approx(0.5)
    # paired: every item moved by the same, so the interval has no width
    assert one["low"] == pytest.approx(0.5) and one["high"] == pytest.approx(0.5)
    record = measure_record("t", {"a": before}, [], draws=500, seed=0)
    assert record["notes"] == ["1 of 40 items are left out: their score is not finite"]


def test_weights_and_exponents_give_the_score_of_the_whole():
    nats, tokens = [1.0, 2.0, 3.0] * 5, [10.0, 20.0, 70.0] * 5
    one = Scores("perplexity", ITEMS[:15], nats, tokens, exponent=True, higher_is_better=False)
    record = measure_record("ppl:a", {"m": one}, [], draws=500, seed=0)
    assert record["scores"][0]["value"] == pytest.approx(math.exp(2.6)) and record["changes"] == []


def test_a_record_has_grid_failures_and_notes_of_each_model():
    grid = {"256 tokens": {"depth 0%": [0, 1], "depth 50%": [2, 3]}}
    before = scores([0.0, 1.0, None, None], grid=grid, failed={"error": 2}, notes=["2 failed"])
    after = scores([1.0, 1.0, 1.0, 0.0], grid=grid)
    record = measure_record("needle", {"a": before, "b": after}, [("a", "b"), ("a", "c")], draws=500, seed=0)
    cells = record["grid"]["256 tokens"]
    assert cells == {"depth 0%": {"a": 0.5, "b": 1.0}, "depth 50%": {"a": None, "b": 0.5}}
    assert record["scores"][0] | {"low": 0, "high": 0} == {
        "model": "a", "value": 0.5, "low": 0, "high": 0, "items": 2, "failed": {"error": 2}
    }  # fmt: skip
    assert record["notes"] == ["a: 2 failed"] and [each["items"] for each in record["changes"]] == [2]
    nothing = measure_record("t", {"a": scores([None] * 3)}, [], draws=500, seed=0)
    assert nothing["scores"][0]["value"] is None and nothing["items"] == 3


def test_measures_are_matched_between_models():
    one, other = scores(DRAWN), replace(scores(DRAWN), measure="f1")
    assert same_measures("t", {"a": [one, other], "b": [one, other]}) == [
        {"a": one, "b": one},
        {"a": other, "b": other},
    ]
    with pytest.raises(ConfigError, match="t: models have other measures"):
        same_measures("t", {"a": [one], "b": [other]})
