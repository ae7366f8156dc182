"""Numbers of a step of rollouts against numpy and against counts by hand; the four behaviours; the canaries."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from tests.report.rollouts.fake import fake_step
from unfreeze.report.rollouts import Answer
from unfreeze.report.rollouts.behaviours import NAMES, PATTERNS, behaviours
from unfreeze.report.rollouts.canaries import ALARM, Mean, alarms, correlation
from unfreeze.report.rollouts.numbers import checked, numbers_of, reward_of
from unfreeze.report.rollouts.watched import Watched
from unfreeze.report.rollouts.writer import Rollouts


def test_counts_and_means_are_those_of_the_answers():
    step = fake_step(3, groups=20)
    numbers = numbers_of(3, iter(step))
    rewards = np.array([each["reward"] for each in step if each["reward"] is not None])
    assert (numbers["answers"], numbers["groups"], numbers["reward"][0]) == (160, 20, len(rewards))
    assert reward_of(numbers).mean == pytest.approx(rewards.mean(), abs=1e-12)
    assert reward_of(numbers).error == pytest.approx(rewards.var() / len(rewards), abs=1e-12)
    by_group = [[each["reward"] for each in step if each["group"] == group] for group in range(20)]
    assert numbers["without_signal"] == sum(len(set(rs) - {None}) < 2 for rs in by_group)
    values = [each["parts"]["value"] for each in step if each["parts"]]
    assert numbers["parts"]["value"] == (len(values), sum(values))
    log_p = np.concatenate([each["logprobs"] for each in step])
    assert numbers["log_p"] == (len(log_p), pytest.approx(log_p.sum(), abs=1e-9))
    assert numbers["tokens"] == len(log_p) and numbers["longest"] == max(len(each["pieces"]) for each in step)
    assert sum(numbers["stops"].values()) == 160 and numbers["outcomes"] == {"ok": 158, "timeout": 2}
    assert (
        checked(numbers) == numbers and checked({**numbers, "tokens": "x"}) is None and checked(None) is None
    )


def test_the_correlation_is_numpys_over_deviations_from_the_groups():
    step = fake_step(5, groups=12)
    canaries = numbers_of(5, step)["canaries"]
    assert canaries.keys() == {"length", "format"}
    graded = [each for each in step if each["reward"] is not None]
    for name, value in (("length", lambda a: len(a["pieces"])), ("format", lambda a: a["parts"]["format"])):
        sides = [[each["reward"] for each in graded], [float(value(each)) for each in graded]]
        groups = np.array([each["group"] for each in graded])
        for side in sides:
            for group in set(groups):
                inside = groups == group
                side[:] = np.array(side) - inside * np.array(side)[inside].mean()
        assert correlation(canaries[name]) == pytest.approx(np.corrcoef(*sides)[0, 1], abs=1e-12)


def lengthy(step: int, slope: float, level: float) -> list[Answer]:
    """Rewards that follow the length within a group; a group's own length follows its number."""
    rows: list[Answer] = []
    for group in range(4):
        for i in range(8):
            text, reward = "word " * (10 * group + 5 + i), level + slope * (i - 3.5) + 0.3 * (i % 2)
            rows.append({"step": step, "group": group, "answer": i, "text": text, "reward": reward})
    return rows


def raised(slope: float, rise: float, steps: int = 8) -> list[str]:
    numbers = [numbers_of(step, lengthy(step, slope, rise * step)) for step in range(steps)]
    return alarms([each["canaries"] for each in numbers], [reward_of(each) for each in numbers])


def test_a_reward_that_rises_with_length_is_an_alarm_and_its_control_arms_are_not():
    (alarm,) = raised(slope=0.2, rise=1.0)
    assert alarm.startswith("The reward follows length (r = +0.9") and "read the best answers" in alarm
    assert raised(slope=-0.2, rise=1.0)[0].startswith("The reward follows length (r = -0.9")
    assert raised(slope=0.2, rise=0.0) == []  # it does not rise
    assert raised(slope=0.2, rise=-1.0) == []
    assert raised(slope=0.0, rise=1.0) == []  # it does not follow the length
    assert raised(slope=0.2, rise=1.0, steps=1) == []  # one step is no trend


def test_a_run_that_goes_on_warns_once_as_the_page_does(tmp_path):
    """Step by step, also after a resume in the middle: as alarms() of all steps, at its first sentence."""
    steps = [lengthy(step, 0.2, float(max(0, step - 10))) for step in range(1, 31)]
    numbers = [numbers_of(step, rows) for step, rows in enumerate(steps, 1)]
    expected = [
        alarms([each["canaries"] for each in numbers[:n]], [reward_of(each) for each in numbers[:n]])
        for n in range(1, 31)
    ]
    first = next(n for n, sentences in enumerate(expected, 1) if sentences)
    assert 10 < first < 25 and expected[-1]

    watched = Watched(tmp_path)
    heard = {step: new for step, rows in enumerate(steps, 1) if (new := watched.look(step, rows))}
    assert heard == {first: expected[first - 1]}

    for stopped, again in ((first - 1, {first: expected[first - 1]}), (first + 2, {})):
        files = Rollouts(tmp_path / str(stopped))
        for step in range(1, stopped + 1):
            files.write(step, steps[step - 1])
        resumed = Watched(tmp_path / str(stopped))
        new = {n: said for n in range(stopped + 1, 31) if (said := resumed.look(n, steps[n - 1]))}
        assert new == again


def test_long_hard_prompts_are_no_alarm():
    """Between groups reward and length are one; within groups they are apart, and only that is learnt."""
    rows: list[Answer] = []
    for group in range(8):
        for i in range(8):
            text = "word " * (10 * group + (i * 5) % 8)
            rows.append(
                {"step": 1, "group": group, "answer": i, "text": text, "reward": group + 0.1 * (i // 4)}
            )
    pooled = np.corrcoef([len(each["text"]) for each in rows], [each["reward"] for each in rows])[0, 1]
    r = correlation(numbers_of(1, rows)["canaries"]["length"])
    assert pooled > 0.95 and r is not None and abs(r) < 0.3 < ALARM


def test_form_is_counted_in_the_text_where_no_part_of_the_reward_is_named_after_it():
    texts = ["plain", "<answer>1</answer>", r"\boxed{1}", "**a**\n```\n", "#### 4", "no #### here"]
    rows: list[Answer] = [
        {"step": 1, "group": 0, "answer": i, "text": text, "reward": float(i)} for i, text in enumerate(texts)
    ]
    numbers = numbers_of(1, rows)
    marks = [0, 2, 1, 3, 1, 0]
    assert correlation(numbers["canaries"]["marks of form"]) == pytest.approx(
        np.corrcoef(range(6), marks)[0, 1], abs=1e-12
    )


def test_equal_rewards_have_no_correlation_and_no_signal():
    rows: list[Answer] = [
        {"step": 1, "group": 0, "answer": i, "text": "a " * i, "reward": 1.0} for i in range(4)
    ]
    numbers = numbers_of(1, rows)
    assert numbers["without_signal"] == 1 and correlation(numbers["canaries"]["length"]) is None
    assert numbers_of(1, [])["reward"] == (0, 0, 0)
    ungraded: list[Answer] = [{"step": 1, "group": 0, "answer": 0, "reward": None, "outcome": "error"}]
    assert numbers_of(1, ungraded)["without_signal"] == 1 and numbers_of(1, ungraded)["canaries"] == {}


def test_the_largest_rewards_stay_finite():
    rows: list[Answer] = [
        {
            "step": 1,
            "group": 0,
            "answer": i,
            "reward": reward,
            "parts": {"format": reward},
            "logprobs": [reward],
        }
        for i, reward in enumerate([1e300, -1e300, 0.0])
    ]
    numbers = numbers_of(1, rows)
    assert checked(numbers) and math.isfinite(reward_of(numbers).error)
    assert correlation(numbers["canaries"]["format"]) == pytest.approx(1.0)
    assert Mean(2, 1.0, 0.5).error == pytest.approx(0.0)


SAYS = {
    "verification": (
        "Let me check this.",
        "Let's double-check the sum.",
        "To verify, we add again.",
        "Plugging 3 back in gives 7.",
        "Does this hold?",
    ),
    "backtracking": (
        "Wait, that is odd.",
        "This does not work.",
        "That is wrong, so",
        "Let\u2019s try another way.",
        "I made a mistake above.",
    ),
    "subgoals": (
        "First, we need to add.",
        "Step 2: multiply.",
        "Next, I will divide.",
        "Break the problem into two.",
    ),
    "backward chaining": (
        "Working backwards, 24 is 8 times 3.",
        "To reach 24 we need a multiple of 8.",
        "Starting from the goal, subtract.",
        "To get to a multiple of ten",
    ),
}
"""Sentences of our own, each an instance of its behaviour by the definitions of arXiv:2503.01307, section 2."""


@pytest.mark.parametrize("name", NAMES)
def test_each_behaviour_is_found_in_its_sentences_and_only_there(name: str):
    for sentence in SAYS[name]:
        assert behaviours(sentence) == {**dict.fromkeys(NAMES, 0), name: 1}, sentence
    assert behaviours(" ".join(SAYS[name]))[name] == len(SAYS[name])


def test_plain_sentences_show_no_behaviour():
    plain = "Paris is the capital of France. The wait was long; checks are paid by step. I work and try. To get 3 add 1."
    assert behaviours(plain) == dict.fromkeys(NAMES, 0) and behaviours("") == dict.fromkeys(NAMES, 0)


def test_no_pattern_can_make_a_search_quadratic():
    """Counted, not timed: every repetition has a bound."""
    patterns = [pattern for several in PATTERNS.values() for pattern in several]
    assert len(patterns) > 15 and not [pattern for pattern in patterns if re.search(r"[*+]", pattern)]
