"""Metrics by tables made by hand, and the answer of a row in each shape that rows have."""

from __future__ import annotations

import pytest

from unfreeze.core.errors import DataError
from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.evaluate.guarded import math_verify, regex
from unfreeze.evaluate.metrics import (
    contains,
    exact,
    expected_of,
    final,
    last_number,
    numeric,
    refuse_row,
    simple,
)


@pytest.mark.parametrize(
    ("metric", "text", "expected", "right"),
    [
        (exact, " Paris\n", "Paris", True),
        (exact, "paris", "Paris", False),
        (exact, "Paris.", "Paris", False),
        (contains, "It is Paris.", "Paris", True),
        (contains, "Yen, Japan uses.", "yen", True),
        (contains, "79 protons", "7", False),
        (contains, "7.5 protons", "7", False),
        (contains, "Australia", "Au", False),
        (contains, "答案是北京。", "北京", True),
        (contains, "서울은 수도입니다", "서울", True),
        (contains, "答案是上海。", "北京", False),
        (numeric, "so 3 + 4 = 7.", "7", True),
        (numeric, "first 7, then 8", "7", False),
        (numeric, "it is $1,234.50", "1234.5", True),
        (numeric, "x = \N{MINUS SIGN}4", "-4", True),
        (numeric, "3-5", "-5", False),
        (numeric, "3/4 of it", "0.75", True),
        (numeric, "about 1e-3", "0.001", True),
        (numeric, "I reason. #### 72", "He has 7 and … #### 72", True),
        (numeric, "none", "7", False),
        (numeric, "7.0001", "7", False),
        (numeric, "1/0", "7", False),
    ],
)
def test_by_hand(metric, text, expected, right):
    assert metric(text, expected) is right


def test_numbers_are_read_as_people_write_them():
    texts = ["12,5", "1,000,000", ".5", "5.", "v2", "$12", "50%", "2 / 8"]
    assert [last_number(text) for text in texts] == [5, 1e6, 0.5, 5, None, 12, 50, 0.25]


def test_reasoning_is_no_part_of_the_answer():
    assert final("<think>Paris? No, </think>Oslo") == "Oslo" and final("no end <think>") == "no end <think>"


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"prompt": "?", "completion": "a"}, ["a"]),
        ({"prompt": "?", "completion": "long", "answer": "a"}, ["a"]),
        ({"prompt": "?", "answer": ["a", "b"]}, ["a", "b"]),
        ({"question": "?", "answer": 7}, ["7"]),
        ({"question": "?", "answer": 7.0}, ["7"]),
        ({"question": "?", "answer": True}, ["true"]),
        ({"instruction": "?", "output": "a"}, ["a"]),
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]}, ["a"]),
        ({"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a"}]}, ["a"]),
        (
            {
                "prompt": [{"role": "user", "content": "?"}],
                "completion": [{"role": "assistant", "content": "a"}],
            },
            ["a"],
        ),
    ],
)
def test_the_answer_of_a_row(fields, answers):
    fields = dict(fields)
    if isinstance(fields.get("answer"), int | float | list) and "question" in fields:
        fields["prompt"] = fields.pop("question")  # the reader takes texts alone in pairs that train
    assert expected_of(asked_from_dict(fields, 1)) == answers


def test_a_row_without_an_answer_is_named():
    with pytest.raises(DataError, match="row 3 has no answer to compare with; its columns: city, prompt"):
        expected_of(asked_from_dict({"prompt": "?", "city": "Rome"}, 3))
    with pytest.raises(DataError, match="row 3: its answer 'Rome' has no number"):
        refuse_row("numeric", asked_from_dict({"prompt": "?", "answer": "Rome"}, 3))
    with pytest.raises(DataError, match="row 3: its answer is empty"):
        refuse_row("contains", asked_from_dict({"prompt": "?", "answer": " "}, 3))
    with pytest.raises(DataError, match=r"row 3: its answer '\(a' is no pattern: missing \)"):
        refuse_row("regex", asked_from_dict({"prompt": "?", "answer": "(a"}, 3))
    refuse_row("exact", asked_from_dict({"prompt": "?", "answer": ""}, 3))


def test_the_best_of_several_answers_counts():
    row = asked_from_dict({"prompt": "?", "answer": ["Rome", "Roma"]}, 1)
    grades = simple("contains")([(row, "Roma!"), (row, "<think>Rome</think>Oslo")])
    assert [each.reward for each in grades] == [1.0, 0.0]


def test_patterns_and_mathematics():
    assert regex("?", "It is 12:30.", [r"\d\d:\d\d"]) == 1 and regex("?", "noon", [r"\d"]) == 0
    assert (
        math_verify("?", r"so \boxed{\frac{1}{2}}", ["0.5"]) == 1 and math_verify("?", "$0.4$", ["0.5"]) == 0
    )
    with pytest.raises(ValueError, match="cannot be read"):
        math_verify("?", "1", [""])
