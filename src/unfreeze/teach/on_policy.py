"""On-policy distillation (GKD, arXiv:2306.13649): a share λ of the steps is on the student's own answers.

Documents of such a step keep their prompt, up to the first supervised token. What follows is sampled from the
student as it is now, at most as long as it was, so the step takes no more memory than its plan says. The
teacher then scores these words as it scores the data's: a student that has gone astray is told what the
teacher would do from there.

Everything depends on (seed, step, place of the micro-batch) alone, so a run that was resumed samples what an
unbroken one does. T tokens of a micro-batch, S documents.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unfreeze.core.torch_types import ints

if TYPE_CHECKING:
    from unfreeze.core.batch import Batch
    from unfreeze.data.packing.source import Source, Step
    from unfreeze.generate.engine import Engine
    from unfreeze.parallel.processes.collectives import Group


@dataclass(frozen=True)
class Answered:
    """A step on the student's own answers. tokens: sampled; ended: answers that ended by a stop id."""

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
        """Whether step number `step`, counted from 0, is one of the student's own. λ = 0: none; 1: all."""
        return _number(self.seed, step) / 2**64 < self.share

    def __call__(
        self, engine: Engine, micro_batches: Sequence[Batch], step: int, group: Group
    ) -> Answered | None:
        """The step's micro-batches with the student's answers; None where the data's own are learned.

        Each process answers its share, and all get all. Where a pass needs all processes (group.lockstep),
        all answer everything together, and take the tokens that process 0 chose (engine.agreed).
        """
        if not self.takes(step):
            return None
        places = list(range(len(micro_batches)))
        own = places if group.lockstep else group.share(places)
        with engine.model.looking():
            said = {place: self._answers(engine, micro_batches[place], step, place) for place in own}
        if not group.lockstep:
            said = {
                int(place): answers
                for text in group.texts(json.dumps(said))
                for place, answers in json.loads(text).items()
            }
        every = [answer for answers in said.values() for answer in answers if answer]
        return Answered(
            [_with_answers(batch, said[place]) for place, batch in enumerate(micro_batches)],
            len(every),
            sum(map(len, every)),
            sum(answer[-1] in engine.stop_ids for answer in every),
        )

    def _answers(self, engine: Engine, batch: Batch, step: int, place: int) -> list[list[int]]:
        """A document's answer as ids; [] where none of its tokens is supervised."""
        from unfreeze.generate.sampling import Sampling

        asked = list(prompts(batch))
        answers: list[list[int]] = [[] for _ in asked]
        for number, together in enumerate(groups([len(p) + room for p, room in asked], batch.num_tokens)):
            together = [i for i in together if asked[i][1]]
            rooms = [asked[i][1] for i in together]
            sampling = Sampling(
                max_new_tokens=max(rooms, default=1),
                temperature=self.temperature,
                seed=_number(self.seed, step, place, number) >> 1,  # torch takes 63 bits
            )
            done = engine.generate([asked[i][0] for i in together], sampling)
            for i, room, answer in zip(together, rooms, done, strict=True):
                answers[i] = answer.tokens[:room]
        return answers


class OwnAnswers:
    """A Source that wraps another: a share of its steps is on the student's own answers.

    engine  of the student that trains
    step    steps before the first one that it gives
    tell    called with the number of a step on own answers, from 1, and what is to be said of them
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
        found = self.on_policy(self.engine, micro_batches, step, self.group)
        if found is None:
            return micro_batches, cursor
        said = {"answers": found.answers, "tokens": found.tokens, "seconds": time.perf_counter() - began}
        self.tell(step + 1, {**said, "ended": found.ended / max(1, found.answers)})
        return found.micro_batches, cursor

    def len_steps(self, epochs: float) -> int | None:
        return self.source.len_steps(epochs)


def prompts(batch: Batch) -> Iterator[tuple[list[int], int]]:
    """Of each document: the ids up to its first supervised target, and how many come from there on.

    A document without supervised targets is all prompt, and 0.
    """
    starts = ints(batch.starts_S)
    for start, length in zip(starts, batch.lengths(), strict=True):
        tokens = ints(batch.tokens_T[start : start + length])
        supervised = batch.weights_T[start : start + length].gt(0)
        first = int(supervised.int().argmax()) + 1 if bool(supervised.any()) else length
        yield tokens[:first], length - first


def groups(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Documents that are answered at once, the longest first.

    Their cache has a row per document, as long as the longest: together at most `tokens` positions, or one
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
    """The batch's prompts with these answers, all supervised with the weight of the first word before."""
    from unfreeze.data.packing.batches import pack
    from unfreeze.data.store.examples import Example

    starts = ints(batch.starts_S)
    examples: list[Example] = []
    for start, (prompt, _), answer in zip(starts, prompts(batch), answers, strict=True):
        weight = float(batch.weights_T[start + len(prompt) - 1]) if answer else 0.0
        examples.append(Example([*prompt, *answer], [0.0] * len(prompt) + [weight] * len(answer)))
    return pack(examples)


def _number(*parts: int) -> int:
    """64 bits that depend on all parts, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
