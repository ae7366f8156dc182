"""On-policy distillation (GKD, arXiv:2306.13649): a share λ of the steps trains on the student's own answers.

Documents of such a step keep their prompt, up to the first supervised token. The continuation is sampled from
the current student, at most as long as the original, so the step takes no more memory than planned. The
teacher then scores these tokens like the data's, so a student that has gone astray learns how the teacher
would continue from there.

Everything depends only on (seed, step, index of the micro-batch, index of the document), so a resumed run
samples the same as an uninterrupted one. T tokens of a micro-batch, S documents.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unfreeze.core.draws import number
from unfreeze.core.torch_types import ints

if TYPE_CHECKING:
    from unfreeze.core.batch import Batch
    from unfreeze.data.packing.source import Source, Step
    from unfreeze.generate.engine import Engine
    from unfreeze.parallel.processes.collectives import Group


@dataclass(frozen=True)
class Answered:
    """A step on the student's own answers. tokens: sampled; ended: number of answers with a stop id."""

    micro_batches: list[Batch]
    answers: int
    tokens: int
    ended: int


@dataclass(frozen=True)
class OnPolicy:
    """share: λ. temperature: of the sampling."""

    share: float
    temperature: float
    seed: int

    def takes(self, step: int) -> bool:
        """Return True if step `step` (from 0) uses the student's own answers. λ = 0: never; 1: always."""
        return number(self.seed, step) / 2**64 < self.share

    def __call__(
        self, engine: Engine, micro_batches: Sequence[Batch], step: int, group: Group
    ) -> Answered | None:
        """Return the step's micro-batches with the student's answers; None if the step uses the data's own.

        Each process answers its share, and all receive all. If a pass needs all processes (group.lockstep),
        all answer everything together, with the tokens that process 0 chose (engine.agreed).
        """
        if not self.takes(step):
            return None
        places = list(range(len(micro_batches)))
        own = places if group.lockstep else group.share(places)
        with engine.model.looking():
            sampled = {place: self._answers(engine, micro_batches[place], step, place) for place in own}
        if not group.lockstep:
            sampled = {
                int(place): answers
                for text in group.texts(json.dumps(sampled))
                for place, answers in json.loads(text).items()
            }
        every = [answer for answers in sampled.values() for answer in answers if answer]
        return Answered(
            [_with_answers(batch, sampled[place]) for place, batch in enumerate(micro_batches)],
            len(every),
            sum(map(len, every)),
            sum(answer[-1] in engine.stop_ids for answer in every),
        )

    def _answers(self, engine: Engine, batch: Batch, step: int, place: int) -> list[list[int]]:
        """Return each document's answer as ids; [] if none of its tokens is supervised."""
        from unfreeze.generate.sampling import Sampling

        requests = list(prompts(batch))
        answers: list[list[int]] = [[] for _ in requests]
        lengths = [len(prompt) + room for prompt, room in requests]
        for together in groups(lengths, batch.num_tokens):
            together = [i for i in together if requests[i][1]]
            rooms = [requests[i][1] for i in together]
            sampling = Sampling(
                temperature=self.temperature, seeds=tuple(number(self.seed, step, place, i) for i in together)
            )
            questions = [requests[i][0] for i in together]
            done = engine.generate(questions, sampling, limits=rooms, max_rows=len(batch.lengths()))
            for i, answer in zip(together, done, strict=True):
                answers[i] = answer.tokens
        return answers


class OwnAnswers:
    """A Source that wraps another; in a share of its steps, the student's own answers replace documents.

    engine  of the student that trains
    step    number of steps before its first one
    tell    called with the number of an on-policy step, from 1, and its statistics
    """

    def __init__(
        self,
        source: Source,
        on_policy: OnPolicy,
        engine: Engine,
        *,
        step: int,
        group: Group,
        tell: Callable[[int, dict[str, float]], None],
    ):
        self.source, self.on_policy, self.engine = source, on_policy, engine
        self.step, self.group, self.tell = step, group, tell

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        micro_batches, cursor = next(self.source)
        began, step = time.perf_counter(), self.step
        self.step += 1
        answered = self.on_policy(self.engine, micro_batches, step, self.group)
        if answered is None:
            return micro_batches, cursor
        statistics = {
            "answers": answered.answers,
            "tokens": answered.tokens,
            "seconds": time.perf_counter() - began,
        }
        self.tell(step + 1, {**statistics, "ended": answered.ended / max(1, answered.answers)})
        return answered.micro_batches, cursor

    def len_steps(self, epochs: float) -> int | None:
        return self.source.len_steps(epochs)


def prompts(batch: Batch) -> Iterator[tuple[list[int], int]]:
    """Yield for each document the ids before its first supervised target, and the number of ids after them.

    A document without supervised targets is all prompt, and 0.
    """
    starts = ints(batch.starts_S)
    for start, length in zip(starts, batch.lengths(), strict=True):
        tokens = ints(batch.tokens_T[start : start + length])
        supervised = batch.weights_T[start : start + length].gt(0)
        first = int(supervised.int().argmax()) + 1 if bool(supervised.any()) else length
        yield tokens[:first], length - first


def groups(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield groups of documents to answer at once, the longest first.

    Their KV cache has a row per document, as long as the longest: together at most `tokens` positions, or one
    document.
    """
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and (len(group) + 1) * lengths[group[0]] > tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _with_answers(batch: Batch, answers: Sequence[Sequence[int]]) -> Batch:
    """Return the batch's prompts with these answers, at the first original token's weight."""
    from unfreeze.data.packing.batches import pack
    from unfreeze.data.store.examples import Example

    starts = ints(batch.starts_S)
    examples: list[Example] = []
    for start, (prompt, _), answer in zip(starts, prompts(batch), answers, strict=True):
        weight = float(batch.weights_T[start + len(prompt) - 1]) if answer else 0.0
        examples.append(Example([*prompt, *answer], [0.0] * len(prompt) + [weight] * len(answer)))
    return pack(examples)
