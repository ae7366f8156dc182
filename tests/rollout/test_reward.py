"""A reward's arguments, its parts and its sum; a step with too many failures stops in one sentence."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.rollout.reward import (
    Graded,
    checked,
    combined,
    outcomes,
    prompt_column,
    prompt_of,
    refuse_failures,
    score,
)
from unfreeze.rollout.signature import Signature, signature_of

USER = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt": "2 + 2?"}, "2 + 2?"),
        ({"question": "2 + 2?", "answer": "4", "system": "Be short."}, "2 + 2?"),
        ({"instruction": "Add.", "input": "2, 2"}, "Add.\n\n2, 2"),
        ({"messages": USER}, USER),
        ({"prompt": USER}, USER),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}]}, USER),
        (
            {"instruction": "2 + 2?", "output": "4", "history": [["1 + 1?", "2"]]},
            [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}, *USER],
        ),
    ],
)
def test_the_prompt_is_the_users_text_or_the_rows_messages(fields, prompt):
    assert prompt_of(asked_from_dict(fields, 1)) == prompt


def keywords(function, **columns):
    row = asked_from_dict(columns, 7)
    return signature_of("reward", function).keywords(row.columns, row.row, prompt_column(row))


def test_columns_are_given_by_keyword_as_python_itself_would_take_them():
    """Oracle: inspect's own bind of what is given."""
    columns = {"question": "q", "answer": "4", "level": 3}

    def named(prompt, completion, answer, level=0, other=None): ...
    def every(prompt, completion, **row): ...
    def only(prompt, completion, *, answer): ...
    def stars(*both, **row): ...
    def any_names(a, b, answer, **row): ...
    def own_prompt(question, reply, **row): ...

    expected = {
        named: {"answer": "4", "level": 3},
        every: columns,
        only: {"answer": "4"},
        stars: columns,
        any_names: columns,
        own_prompt: {"answer": "4", "level": 3},
    }
    for function, these in expected.items():
        assert keywords(function, **columns) == these
        inspect.signature(function).bind("the prompt", "the answer", **keywords(function, **columns))


@pytest.mark.parametrize(
    ("function", "columns", "message", "remedy"),
    [
        (
            lambda question, answer: 1,
            {"question": "q", "answer": "4"},
            "its argument 'answer' is the model's answer, but the rows have a column 'answer' too",
            "rename the argument: def reward(question, reply, answer, …)",
        ),
        (
            lambda prompt, completion: 1,
            {"prompt": "q", "completion": "4"},
            "its argument 'completion' is the model's answer",
            "def reward(prompt, reply, completion, …)",
        ),
        (
            lambda answer, completion: 1,
            {"question": "q", "answer": "4"},
            "its argument 'answer' is the prompt, but",
            "def reward(text, completion, answer, …)",
        ),
        (
            lambda p, c, anwser: 1,
            {"prompt": "q", "answer": "4"},
            "row 7: reward needs the column 'anwser'; nearest: 'answer'; there are: answer, prompt",
            "anwser=None",
        ),
        (lambda p, c, answer: 1, {"prompt": "q", "answer": None}, "row 7: reward needs the column 'answer'", ""),
    ],
)  # fmt: skip
def test_a_column_that_collides_or_is_missing_is_refused_with_the_remedy(function, columns, message, remedy):
    with pytest.raises((ConfigError, DataError)) as refused:
        keywords(function, **columns)
    assert message in refused.value.message and remedy in refused.value.next


def test_a_signature_survives_json():
    signature = signature_of("reward", lambda a, b, c, d=1, *, e, **f: 1)
    assert signature == Signature("reward", ("a", "b"), ("c", "e"), ("d",), True)
    assert Signature.from_json(signature.as_json()) == signature


@pytest.mark.parametrize(
    ("values", "reward", "parts"),
    [
        ({"reward": 1}, 1.0, {}),
        ({"reward": True}, 1.0, {}),
        ({"reward": np.float32(0.5)}, 0.5, {}),
        ({"reward": torch.tensor(0.25)}, 0.25, {}),
        ({"reward": {"a": 0.25, "b": 0.5}}, 0.75, {"a": 0.25, "b": 0.5}),
        ({"reward": {"a": 0.25, "reward": 2}}, 2.0, {"a": 0.25}),
        ({"reward": {"reward": 2}}, 2.0, {}),
        ({"reward": {"a": 0.25, "b": None}}, 0.25, {"a": 0.25}),
        ({"f": 1.0, "g": {"a": 0.5, "b": 0.25}}, 1.75, {"f": 1.0, "g": 0.75, "g.a": 0.5, "g.b": 0.25}),
        ({"f": 1.0, "g": None}, 1.0, {"f": 1.0}),
    ],
)
def test_parts_and_their_sum(values, reward, parts):
    assert score(values) == Graded(reward, parts) and checked(score(values).as_json()) == score(values)


@pytest.mark.parametrize(
    "value", [math.nan, -math.inf, "1", b"1", [1.0], (1.0, 2.0), {}, {1: 2.0}, 1j, object(), {"": "x"}]
)
def test_anything_else_is_no_number(value):
    graded = score({"reward": value})
    assert graded.reward is None and graded.outcome == "not a number" and "reward" in graded.message


@pytest.mark.parametrize("reply", [
    {}, {"reward": 1.0, "parts": [], "outcome": "ok"}, {"reward": "1", "parts": {}, "outcome": "ok"},
    {"reward": math.nan, "parts": {}, "outcome": "ok"}, {"reward": 1.0, "parts": {}, "outcome": "fine"},
    {"reward": None, "parts": {}, "outcome": "ok"}, {"reward": 0.0, "parts": {}, "outcome": "error"},
    {"reward": 1.0, "parts": {"a": None}, "outcome": "ok"}, {"reward": True, "parts": {}, "outcome": "ok"},
])  # fmt: skip
def test_a_reply_that_is_no_reward_is_seen(reply):
    assert checked(reply) is None


def test_an_environment_and_functions_together():
    world, form = Graded(1.0), Graded(0.5, {"a": 0.25, "b": 0.25})
    late, silent = Graded(None, outcome="timeout", message="late"), Graded(None, outcome="no value")
    assert combined({"world": world, "form": form}) == Graded(
        1.5, {"world": 1.0, "form": 0.5, "form.a": 0.25, "form.b": 0.25}
    )
    assert combined({"world": late, "form": form}) == late
    assert combined({"world": silent, "form": world}) == Graded(1.0, {"form": 1.0})
    assert combined({"world": silent}) == silent


def test_too_many_failures_stop_the_run_in_one_sentence():
    good = [Graded(1.0)] * 8
    late, bad = (
        Graded(None, outcome="timeout", message="no reward within 10 s"),
        Graded(None, outcome="error"),
    )
    refuse_failures([*good, late, bad])  # a fifth, and no more
    with pytest.raises(ConfigError) as refused:
        refuse_failures([*good, late, bad, bad], look="unfreeze reward show my.py")
    assert refused.value.message == (
        "3 of 11 answers have no reward (2 error, 1 timeout), more than 20%; the first: no reward within 10 s"
    )
    assert refused.value.next == "unfreeze reward show my.py shows it; mend the reward"
    refuse_failures([], 0.0)
    assert outcomes([*good, bad, late]) == {"ok": 8, "error": 1, "timeout": 1}
