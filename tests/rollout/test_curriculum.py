"""Curricula on a toy whose prompts are known: impossible, easy, and mixed. Uniform drawing is the control arm."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from unfreeze.data.packing.order import Shuffled
from unfreeze.data.rows.row import Conversation
from unfreeze.data.store.examples import Example, Examples
from unfreeze.generate.answer import Completion
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.rollout.answering import InOneTurn
from unfreeze.rollout.curriculum import CURRICULA, RAREST, Adaptive, Hard
from unfreeze.rollout.reward import Graded
from unfreeze.rollout.rollouts import Rolled, Rollouts, Settings

IMPOSSIBLE, EASY, PROMPTS = 8, 16, 24  # prompts below the first number, below the second, and of all
G = 4


def generate(prompts: list[Any], sampling: Any, **options: Any) -> list[Completion]:
    """Answers of one word, 0 or 1 by their seeds."""
    words = [seed % 2 for seed in sampling.seeds]
    return [Completion([word], str(word), "stop", [], sampled_logprobs=[-0.7]) for word in words]


def grade(answers: Any) -> list[Graded]:
    """0 for the impossible, 1 for the easy, else the word."""
    return [
        Graded(0.0 if row.row < IMPOSSIBLE else 1.0 if row.row < EASY else float(text))
        for row, text in answers
    ]


def rollouts(rolled: list[Rolled], start: dict[str, Any] | None = None, **settings: Any) -> Rollouts:
    engine = SimpleNamespace(model=SimpleNamespace(looking=nullcontext), generate=generate)
    examples = Examples.of([Example([3, 3], [0.0, 1.0], row) for row in range(PROMPTS)])
    chosen = Settings(8, G, 1, resample=0, **settings)
    return Rollouts(
        InOneTurn(engine, grade, chosen),  # type: ignore[arg-type]
        examples,
        lambda example: Conversation([], row=example.row),
        chosen,
        order=Shuffled(PROMPTS, 0),
        group=ALONE,
        tell=rolled.append,
        start=start,
    )


def shares(name: str, steps: int = 90) -> tuple[float, dict[str, int]]:
    """Share of groups with a signal, and how often each kind of prompt was drawn."""
    rolled: list[Rolled] = []
    source = rollouts(rolled, curriculum=name)
    for _ in range(steps):
        next(source)
    signal = sum(int(each.groups.signal_P.sum()) for each in rolled) / (8 * steps)
    drawn = [group.example.row for each in rolled for group in each.answers]
    kinds = {"impossible": range(IMPOSSIBLE), "easy": range(IMPOSSIBLE, EASY), "mixed": range(EASY, PROMPTS)}
    return signal, {kind: sum(row in rows for row in drawn) for kind, rows in kinds.items()}


def test_curricula_raise_the_share_of_groups_with_a_signal():
    """A mixed group of 4 has a signal in 7 of 8 cases, so uniform drawing has 7 / 24 = .29. With easy prompts in every
    second pass it is 7/8 · 8 / (8 + 4 + 8) = .35. With both in 1 of 16 passes at least, it nears 7/8 · 16 / 18 = .78.
    """
    uniform, hard, adaptive = (shares(name) for name in ("uniform", "hard", "adaptive"))
    assert uniform[0] == pytest.approx(7 / 24, abs=0.03) and len({*uniform[1].values()}) == 1
    assert hard[0] == pytest.approx(0.35, abs=0.03)
    assert hard[1]["easy"] == pytest.approx(hard[1]["mixed"] / 2, rel=0.1)
    assert hard[1]["impossible"] == pytest.approx(hard[1]["mixed"], rel=0.1)
    assert 0.6 < adaptive[0] < 0.8
    # nothing is left out for good
    assert min(adaptive[1].values()) > 0 and min(hard[1].values()) > 0


@pytest.mark.parametrize("name", CURRICULA)
def test_a_curriculum_depends_on_the_cursor_alone(name):
    whole: list[Rolled] = []
    source = rollouts(whole, curriculum=name)
    cursors = [next(source)[1] for _ in range(12)]
    again: list[Rolled] = []
    resumed = rollouts(again, start=cursors[5], curriculum=name)
    assert [next(resumed)[1] for _ in range(6)] == cursors[6:]
    rows = [[group.example.row for group in each.answers] for each in (*whole[6:], *again)]
    assert rows[:6] == rows[6:]
    assert bool(cursors[5]["records"]) == (name != "uniform")


def test_a_prompt_is_drawn_half_as_often_after_each_group_without_a_signal():
    for silent in range(7):
        curriculum = Adaptive(seed=1)
        for epoch in range(silent):
            curriculum.saw(epoch, 5, [0.0, 0.0], signal=False)
        taken = sum(curriculum.takes(epoch, 5) for epoch in range(4000))
        assert taken / 4000 == pytest.approx(2.0 ** -min(silent, RAREST), abs=0.02)
        curriculum.saw(9, 5, [0.0, 1.0], signal=True)
        assert all(curriculum.takes(epoch, 5) for epoch in range(50)) and not curriculum.records


def test_a_solved_prompt_misses_one_pass():
    curriculum = Hard(seed=1)
    curriculum.saw(3, 5, [1.0, 1.2], signal=True)
    curriculum.saw(3, 6, [1.0, 0.9], signal=True)
    curriculum.saw(3, 7, [], signal=False)
    assert [curriculum.takes(epoch, 5) for epoch in (3, 4, 5, 6)] == [True, False, True, True]
    assert all(curriculum.takes(epoch, prompt) for epoch in (4, 5) for prompt in (6, 7))
