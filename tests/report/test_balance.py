"""The balance of experts as the report says it: what counts as missed, which layer is shown, when a rise is
one (pictures: test_agreement.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unfreeze.core.errors import DataError
from unfreeze.report.balance import COLUMNS, Balance, balance_of, missed, stretches
from unfreeze.report.events import read_events


def balance(*loads: dict[str, list[int]]) -> Balance:
    """Of a run with one step for each load."""
    made = balance_of(
        [{"kind": "train", "step": step, "expert_load": load} for step, load in enumerate(loads, start=1)]
    )
    assert made is not None
    return made


def test_missed_is_no_token_where_ten_were_due():
    assert missed([20, 0, 10, 10]) == [False, True, False, False]
    assert missed([20, 0, 10, 9]) == [False] * 4  # 39 of the 40: chance may leave one out


@pytest.mark.parametrize(
    "load", [[1], {"1": []}, {"1": [0.5]}, {"1": [-1]}, {"1": [True]}, {"1": [10**400]}, {"1": "x"}]
)
def test_a_dense_run_has_none_and_damage_is_named(tmp_path: Path, load: object):
    assert balance_of([{"kind": "train", "step": 1}]) is None
    (tmp_path / "events.jsonl").write_text(
        json.dumps({"kind": "train", "step": 1, "expert_load": load}) + "\n"
    )
    with pytest.raises(DataError, match=r"line 1: train\.expert_load\S* is "):
        read_events(tmp_path / "events.jsonl")


def test_the_layer_with_most_missed_cells_is_shown_else_the_one_with_the_busiest_expert():
    even, busy, few = {"1": [20, 20]}, {"2": [39, 1]}, {"3": [20, 20]}
    assert balance({**even, **busy, **few}).shown == "2"
    made = balance({**even, **busy, **few}, {"1": [20, 20], "2": [39, 1], "3": [0, 40]})
    assert made.shown == "3" and made.gone == {"1": 0, "2": 0, "3": 1}
    assert made.gone_words() == "1 time an expert got no token in a step where 10 or more were due (expert 0)"


@pytest.mark.parametrize(
    "first, last, risen",
    [
        ([10] * 8, [17, 9, 9, 9, 9, 9, 9, 9], False),  # 0 to 0.7
        ([10] * 8, [20, 10, 10, 8, 8, 8, 8, 8], True),  # 0 to 1
        ([2] * 8, [4, 2, 2, 2, 2, 2, 1, 1], False),  # as much, of 16 tokens in a step: chance
        ([20, 10, 10, 8, 8, 8, 8, 8], [10] * 8, False),  # better
    ],
)
def test_a_rise_of_one_mean_is_one(first: list[int], last: list[int], risen: bool):
    assert balance({"1": first}, {"1": last}).has_risen is risen


def test_idle_experts_are_counted_apart_where_too_little_was_due():
    assert balance({"1": [20, 20], "2": [3, 3]}).unused_words() == "All 4 experts got tokens"
    made = balance({"1": [0, 40], "2": [3, 0]})
    assert (
        made.unused == 1
        and made.unused_words()
        == "2 of 4 experts got no token (1 of them in layers with a fair share below 10 tokens)"
    )


def test_a_layer_without_a_load_in_some_step_counts_as_idle_there():
    assert balance({"1": [1, 2], "2": [3, 4]}, {"2": [3, 4]}).cells == {
        "1": [[1, 2], [0, 0]],
        "2": [[3, 4], [3, 4]],
    }


def test_a_long_run_has_the_same_columns_for_every_picture():
    made = balance(*({"1": [step, 1]} for step in range(1, 251)))
    assert len(made.columns) == 84 <= COLUMNS and made.columns[0] == (1, 3) and made.columns[-1] == (250, 250)
    assert made.cells["1"][0] == [1 + 2 + 3, 3]


def test_stretches_cover_every_step_once():
    assert [list(part) for part in stretches(5, 2)] == [[0, 1, 2], [3, 4]] and stretches(0, 4) == []
    assert (
        max(len(stretches(n, 160)) for n in range(1, 1000)) <= 160
        and sum(map(len, stretches(997, 160))) == 997
    )
