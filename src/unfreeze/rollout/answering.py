"""Prompts, answered and graded by all processes together. How is a part: one turn, or an environment.

    every = sampled(how, questions, n, group)            # n answers to each prompt, in every process
    graded = rewards(how, [(row, answer), …], group)

Processes share the prompts. Where they share the weights, so that a forward pass needs all of them
(lockstep), each answers every prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from unfreeze.core.draws import number
from unfreeze.core.errors import StepLeft
from unfreeze.data.tokens.asked import prompt_of
from unfreeze.generate.sampling import Sampling
from unfreeze.rollout.reward import Graded
from unfreeze.rollout.sampled import Sampled, as_text, of_text

if TYPE_CHECKING:
    from unfreeze.data.rows.row import Conversation
    from unfreeze.data.store.examples import Example
    from unfreeze.generate.engine import Engine
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.rollout.rollouts import Settings

Grade = Callable[[Sequence[tuple["Conversation", str]]], list[Graded]]
"""(row, text of an answer) of many answers -> their rewards."""


class Asked(NamedTuple):
    """A prompt with its row. key: the numbers that the seeds of its answers are made of."""

    example: Example
    row: Conversation
    key: tuple[int, ...]


class Answering(Protocol):
    """A way to answer prompts and to grade the answers."""

    @property
    def engine(self) -> Engine: ...

    def sample(self, questions: Sequence[Asked], n: int, *, greedy: bool = False) -> list[list[Sampled]]:
        """Return n answers to each of this process's prompts."""
        ...

    def grade(self, answered: Sequence[tuple[Conversation, Sampled]]) -> list[Graded]:
        """Return the rewards of all processes' answers; called in process 0."""
        ...


class InOneTurn:
    """An answer is one turn of the model; functions grade its text."""

    def __init__(self, engine: Engine, grade: Grade, settings: Settings):
        self._engine, self._grade, self.settings = engine, grade, settings

    @property
    def engine(self) -> Engine:
        return self._engine

    def sample(self, questions: Sequence[Asked], n: int, *, greedy: bool = False) -> list[list[Sampled]]:
        """Sample n answers to each prompt; those to one prompt share its prefill."""
        if not questions:
            return []
        settings = self.settings
        seeds = tuple(number(*each.key, answer) for each in questions for answer in range(n))
        temperature = 0.0 if greedy else settings.temperature
        sampling = Sampling(settings.new_tokens, temperature=temperature, n=n, seeds=seeds)
        prompts = [prompt_of(each.example) for each in questions]
        done = self._engine.generate(
            prompts, sampling, max_rows=settings.at_once, experts=settings.replay and not greedy
        )
        answers = [Sampled.of(each) for each in done]
        return [answers[first : first + n] for first in range(0, len(answers), n)]

    def grade(self, answered: Sequence[tuple[Conversation, Sampled]]) -> list[Graded]:
        """Grade the texts."""
        return self._grade([(row, answer.text) for row, answer in answered])


def sampled(
    how: Answering, questions: Sequence[Asked], n: int, group: Group, *, greedy: bool = False
) -> list[list[Sampled]]:
    """Return n answers to each prompt, in every process; with `greedy` a greedy one comes last.

    Raises StepLeft in every process if a signal ended the sampling of one.
    """
    places = list(range(len(questions)))
    own = places if group.lockstep else group.share(places)
    mine = [questions[place] for place in own]
    answers: list[list[Sampled]] | None
    try:
        answers = how.sample(mine, n)
        if greedy:
            last = how.sample(mine, 1, greedy=True)
            answers = [[*each, *one] for each, one in zip(answers, last, strict=True)]
    except StepLeft:
        answers = None
    if not group.lockstep and group.size > 1:
        sent = answers and [[place, as_text(each)] for place, each in zip(own, answers, strict=True)]
        every = [json.loads(text) for text in group.texts(json.dumps(sent))]
        if None in every:
            raise StepLeft
        by_place = {place: of_text(each) for part in every for place, each in part}
        return [by_place[place] for place in places]
    if answers is None:
        raise StepLeft
    return answers


def rewards(how: Answering, answered: Sequence[tuple[Conversation, Sampled]], group: Group) -> list[Graded]:
    """Grade the answers in process 0; the others take its rewards.

    Raises StepLeft in every process if a signal ended the grading.
    """

    def grade() -> list[Graded] | None:
        try:
            return how.grade(answered) if answered else []
        except StepLeft:
            return None

    graded = group.on_rank0(grade)
    if group.size > 1:
        fields = None if graded is None else [each.as_json() for each in graded]
        of_first = json.loads(group.of_first(json.dumps(fields).encode()))
        graded = None if of_first is None else [Graded(**each) for each in of_first]
    if graded is None:
        raise StepLeft
    return graded
