"""The Source of a run with rewards: prompts, a group of answers to each, rewards, advantages, micro-batches.

A rollout is on-policy: its answers come from the weights that it updates, once or several times (updates.py).
It depends only on (seed, number of the rollout), the place in the order of prompts, and the weights, so a
resumed run samples what an uninterrupted one does. Every process samples its share of the groups, process 0
grades, and all get the same micro-batches.

P groups, G answers to each prompt.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from unfreeze.core.errors import CheckpointError, ConfigError, StepRefused
from unfreeze.core.torch_types import flags, floats
from unfreeze.data.packing.batches import pack
from unfreeze.data.packing.order import Order
from unfreeze.data.packing.packers import first_fit
from unfreeze.data.packing.source import Cursor, Step
from unfreeze.data.store.examples import Example, Examples
from unfreeze.data.tokens.asked import prompt_of
from unfreeze.data.tokens.transcript import Sample
from unfreeze.objectives.policy import Per
from unfreeze.rollout.answering import Answering, Asked, rewards, sampled
from unfreeze.rollout.curriculum import CURRICULA, SOLVED, Name
from unfreeze.rollout.groups import Advantage, Groups, advantages, divided, next_average, rewards_of
from unfreeze.rollout.prompts import text_of
from unfreeze.rollout.reward import Graded, outcomes, refuse_failures
from unfreeze.rollout.routes import with_routes
from unfreeze.rollout.sampled import Sampled
from unfreeze.rollout.updates import Measure, Update, as_tensors, dealt, numbered, of_tensors, with_trainer

if TYPE_CHECKING:
    from torch import Tensor

    from unfreeze.core.batch import Batch
    from unfreeze.data import Tokenizer
    from unfreeze.data.rows.row import Conversation
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.report.rollouts.answers import Answer

CUT = ("length", "window")
"""Stop reasons of an answer that did not end by itself."""
SILENT_STEPS = 3
"""First steps that may all have no group with a signal."""
EASIER = "take easier prompts, a reward with parts or more --answers, or warm up with unfreeze sft"
HARDER = "take harder prompts, or a reward with parts that tells good answers from better ones"
"""What helps where no answer is good, and where all are."""


@dataclass(frozen=True)
class Settings:
    """Sampling and grading of a rollout.

    updates           optimizer steps that a rollout is trained on in, at most one per prompt
    prompts, answers  P and G
    new_tokens        of an answer, at most
    score_cut         grade answers that were cut; else they are left out of their group
    resample          times that groups with equal rewards get other prompts
    replay            keep the chosen experts for the training pass
    at_once           answers sampled at the same time; None: as many as fit in memory
    passes            processes: the training passes are a multiple of them
    failing           largest share of answers without a reward
    micro_batch       tokens of a training pass
    every_answer      train on answers without an advantage too: the loss has a KL, which they have
    look              command that shows failed rewards; "": that for functions and environments
    about             further entries of the cursor
    """

    prompts: int
    answers: int
    new_tokens: int
    seed: int = 0
    updates: int = 1
    curriculum: Name = "uniform"
    temperature: float = 1.0
    score_cut: bool = False
    resample: int = 1
    replay: bool = False
    at_once: int | None = 128
    passes: int = 1
    failing: float = 0.2
    micro_batch: int = 4096
    advantage: Advantage = field(default_factory=Advantage)
    per: Per = "tokens"
    every_answer: bool = False
    look: str = ""
    about: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Answers:
    """The answers to one prompt, with their rewards."""

    example: Example
    row: Conversation
    sampled: list[Sampled]
    graded: list[Graded] = field(default_factory=list[Graded])
    greedy: Graded | None = None

    def rewards(self) -> list[float | None]:
        """The rewards; None for an answer that is left out."""
        return [each.reward for each in self.graded]


@dataclass(frozen=True)
class Rolled:
    """A rollout's groups with their advantages, and the seconds of sampling and grading.

    step: the first optimizer step that trains on it.
    """

    step: int
    answers: list[Answers]
    groups: Groups
    sampling: float
    grading: float

    def has_tokens(self) -> bool:
        """Return True unless every answer is empty: agents may not ask, prompts may fill the window."""
        return any(answer.tokens for group in self.answers for answer in group.sampled)


Tell = Callable[[Rolled], None]
"""Called on every process with each rollout, before its first update."""


class Rollouts:
    """The steps of a run: `updates` of them for each rollout.

    how       answers prompts
    examples  prompts with room for an answer (data/tokens/asked.py)
    row_of    an example's row
    measure   the trainer's log p before the first update; None if the loss does not read it
    """

    def __init__(
        self,
        how: Answering,
        examples: Examples,
        row_of: Callable[[Example], Conversation],
        settings: Settings,
        *,
        order: Order,
        group: Group,
        tell: Tell,
        measure: Measure | None = None,
        start: Cursor | None = None,
    ):
        self.how, self.examples, self.row_of = how, examples, row_of
        self.settings, self.order, self.group, self.tell, self.measure = settings, order, group, tell, measure
        at: Cursor = start or {"step": 0, "taken": 0, "average": None, "silent": 0}
        self.step, self.taken = int(at["step"]), int(at["taken"])
        self.rollout = int(at.get("rollout", at["step"]))
        self.average: float | None = at["average"]
        self.silent = int(at["silent"])  # rollouts from the first on without a signal; -1: one had some
        self.curriculum = CURRICULA[settings.curriculum](settings.seed, at.get("records"))
        self._updates: list[Update] = []  # of the current rollout
        self._left = int(at.get("left", 0))  # how many of them follow
        self._epoch: tuple[int, list[int]] = (-1, [])

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if not self._left:
            self._updates = self._begun()
            self._left = len(self._updates)
        batches = self._updates[-self._left]
        self._left -= 1
        self.step += 1
        passes = self.taken / len(self.examples)
        return batches, {
            "step": self.step,
            "rollout": self.rollout,
            "left": self._left,
            "taken": self.taken,
            "average": self.average,
            "silent": self.silent,
            "passes": passes,
            "records": self.curriculum.records.copy(),
            **self.settings.about,
        }

    def go_on(self, kept: Mapping[str, Tensor]) -> None:
        """Take the updates that follow the cursor from its save. kept: result of `kept`.

        Raises CheckpointError if they are not as many as the cursor says.
        """
        self._updates = of_tensors(kept, self.settings.passes)
        if len(self._updates) != self._left:
            raise CheckpointError(
                f"the save lacks a part of a rollout: it has {len(self._updates)} of {self._left} updates",
                next="remove the newest folder in RUN/state to resume from the one before",
            )

    def _begun(self) -> list[Update]:
        """Return the updates of a new rollout."""
        with self.how.engine.model.looking():
            rolled = self.rolled()
        self.tell(rolled)
        self.refuse(rolled)
        self.average = next_average(self.average, _rewards(rolled.answers), self.settings.advantage.decay)
        self.rollout += 1
        parts = dealt(rolled, self.settings.updates, self.settings.seed)
        updates = numbered([micro_batches(part, self.settings) for part in parts if part.has_tokens()])
        return updates if self.measure is None else with_trainer(updates, self.measure, self.group)

    def kept(self, cursor: Cursor) -> dict[str, Tensor]:
        """Return the updates that follow the cursor in its rollout, for a save (updates.py: as_tensors)."""
        left = cursor["left"]
        return as_tensors(self._updates[-left:]) if left else {}

    def len_steps(self, epochs: float) -> int | None:
        """Return the steps that show every prompt `epochs` times, without resampling or a curriculum."""
        rollouts = max(1, math.ceil(epochs * len(self.examples) / self.settings.prompts))
        return rollouts * self.settings.updates

    def rolled(self) -> Rolled:
        """Sample and grade the groups; those without a signal make room for others, if allowed."""
        settings, every = self.settings, list[Answers]()
        drawn: list[tuple[int, int]] = []
        seconds = [0.0, 0.0]
        wanted = settings.prompts
        for turn in range(1 + settings.resample):
            prompts = [self._next() for _ in range(wanted)]
            drawn += prompts
            new = self._sampled([self.examples[prompt] for _, prompt in prompts], turn, seconds)
            every += new
            wanted = settings.prompts - int(self._groups(every).signal_P.sum())
            skipped = any(each.outcome == "skipped" for group in new for each in group.graded)
            if wanted <= 0 or skipped:  # the step is refused
                break
        groups = self._groups(every)
        for (epoch, prompt), group, signal in zip(drawn, every, flags(groups.signal_P), strict=True):
            known = [reward for reward in group.rewards() if reward is not None]
            self.curriculum.saw(epoch, prompt, known, signal)
        return Rolled(self.step + 1, every, groups, *seconds)

    def refuse(self, rolled: Rolled) -> None:
        """Raise ConfigError if too many rewards failed, or if the first steps had no signal at all."""
        graded = [each for group in rolled.answers for each in group.graded if each.outcome != "cut"]
        try:
            refuse_failures(graded, self.settings.failing, look=self.settings.look)
        except ConfigError as error:
            raise StepRefused(error.message, next=error.next) from None
        if not rolled.has_tokens():
            raise StepRefused(
                f"no answer of step {rolled.step} has a token: each prompt, with its tools, fills the window",
                next="a larger --sequence-length and --tokens-per-step",
            )
        if self.silent < 0 or bool(rolled.groups.signal_P.any()):
            self.silent = -1
            return
        self.silent += 1
        if self.silent < SILENT_STEPS:
            return
        every = {each.reward for each in graded}
        (only,) = every if len(every) == 1 else (None,)
        value = "each equal" if only is None else f"all {only:g}"
        cut = sum(answer.stop in CUT for group in rolled.answers for answer in group.sampled)
        advice = EASIER if only is None or only < SOLVED else HARDER
        many = 0.9 if self.settings.score_cut else 0.5
        if cut > many * sum(len(group.sampled) for group in rolled.answers):
            value += f", {cut} answers cut"
            advice = f"a larger --max-new-tokens than {self.settings.new_tokens}"
        raise StepRefused(
            f"no group of the first {self.silent} steps has answers with different rewards ({value} in the"
            f" last {len(rolled.answers)} groups): there is nothing to learn from",
            next=f"{advice}; unfreeze reward show my.py shows answers",
        )

    def _next(self) -> tuple[int, int]:
        """Return (pass over the data, the next prompt of its order that the curriculum takes)."""
        while True:
            epoch, place = divmod(self.taken, len(self.examples))
            if self._epoch[0] != epoch:
                self._epoch = epoch, self.order(epoch)
            self.taken += 1
            prompt: int = self._epoch[1][place]
            if self.curriculum.takes(epoch, prompt):
                return epoch, prompt

    def _sampled(self, examples: Sequence[Example], turn: int, seconds: list[float]) -> list[Answers]:
        """Sample G answers to each prompt, and grade them. Adds to seconds of (sampling, grading)."""
        began, settings = time.perf_counter(), self.settings
        questions = [
            Asked(example, self.row_of(example), (settings.seed, self.rollout, turn, place))
            for place, example in enumerate(examples)
        ]
        greedy = settings.advantage.baseline == "greedy"
        every = sampled(self.how, questions, settings.answers, self.group, greedy=greedy)
        sampled_at = time.perf_counter()
        groups = [
            Answers(each.example, each.row, answers) for each, answers in zip(questions, every, strict=True)
        ]
        self._graded(groups)
        seconds[0] += sampled_at - began
        seconds[1] += time.perf_counter() - sampled_at
        return groups

    def _graded(self, groups: Sequence[Answers]) -> None:
        """Grade the answers; cut ones only if they are scored."""
        score = self.settings.score_cut
        answered = [
            (group.row, each) for group in groups for each in group.sampled if score or each.stop not in CUT
        ]
        each_graded = iter(rewards(self.how, answered, self.group))
        for group in groups:
            own = [
                next(each_graded) if score or answer.stop not in CUT else Graded(None, outcome="cut")
                for answer in group.sampled
            ]
            if len(own) > self.settings.answers:
                group.greedy = own.pop()
                group.sampled.pop()
            group.graded = own

    def _groups(self, answers: Sequence[Answers]) -> Groups:
        greedy_P = None
        if self.settings.advantage.baseline == "greedy":
            greedy_P = rewards_of([[each.greedy.reward if each.greedy else None for each in answers]])[0]
        return advantages(_rewards(answers), self.settings.advantage, average=self.average, greedy_P=greedy_P)


def _rewards(answers: Sequence[Answers]) -> torch.Tensor:
    return rewards_of([group.rewards() for group in answers])


def micro_batches(rolled: Rolled, settings: Settings) -> list[Batch]:
    """Return the training passes of a step: its answers with an advantage (or every_answer), packed.

    The divisor is that of all answers with a reward, whatever their advantage (rollout/groups.py: divided).
    Without any advantage one answer is kept, so that the step has a pass; its gradient is 0. With a KL the
    tokens of an answer that is not trained on, or comes again, are not supervised: else they had one.
    """
    examples: list[Example] = []
    fed: list[Sample] = []
    worth: list[float] = []
    length: list[int] = []  # sampled tokens of the answer that an example is from
    trained = tokens = 0
    rows, kept = map(_rows, (rolled.groups.advantage_PG, rolled.groups.trained_PG))
    left = [answer for group in rolled.answers for answer in group.sampled if answer.tokens]
    for group, advantage_G, trained_G in zip(rolled.answers, rows, kept, strict=True):
        prompt = prompt_of(group.example)
        for answer, advantage, trains in zip(group.sampled, advantage_G, trained_G, strict=False):
            trained += bool(trains)
            tokens += bool(trains) * len(answer.tokens)
            last = not examples and answer is left[-1]
            if advantage or (settings.every_answer and trains) or last:
                supervised = float(trains or not settings.every_answer)
                for each in answer.examples(prompt):
                    weights = [supervised * own for own in each.sampled]
                    examples.append(Example(each.ids, weights, group.example.row))
                    fed.append(each)
                    worth.append(advantage)
                    length.append(len(answer.tokens))

    lengths = [example.num_tokens for example in examples]
    placed = first_fit(range(len(examples)), lengths, max(settings.micro_batch, *lengths))
    batches: list[Batch] = []
    packed: set[int] = set()  # documents of earlier passes: one that comes again adds nothing
    for inside in in_multiples(placed, settings.passes):
        of = [silent(examples[i]) if i in packed else examples[i] for i in inside]
        extras = {
            "advantage": [[worth[i]] * lengths[i] for i in inside],
            "sampler_log_p": [_at_sampled(fed[i]) for i in inside],
            "answer_tokens": [[float(length[i])] * lengths[i] for i in inside],
        }
        packed.update(inside)
        batches.append(with_routes(pack(of, extras), [fed[i].experts for i in inside]))
    return divided(batches, settings.per, answers=max(1, trained), tokens=max(1, tokens))


def silent(example: Example) -> Example:
    """Return the document without a supervised token."""
    return replace(example, weights=[0.0] * example.num_tokens)


def _at_sampled(fed: Sample) -> list[float]:
    """log p at the place of each sampled id, 0 elsewhere."""
    each = iter(fed.log_p)
    return [next(each) if own else 0.0 for own in fed.sampled]


def in_multiples(placed: Sequence[int], passes: int) -> list[list[int]]:
    """Return the documents of each pass; passes are divided until their number is a multiple of `passes`.

    placed: the pass of each document. With fewer documents than needed the last ones come again: train_step
    gives each process as many passes, and those that come again are silent (micro_batches).
    """
    batches = [[i for i, place in enumerate(placed) if place == batch] for batch in range(max(placed) + 1)]
    while len(batches) % passes:
        largest = max(range(len(batches)), key=lambda batch: len(batches[batch]))
        inside = batches.pop(largest)
        half = len(inside) // 2
        batches[largest:largest] = [inside[:half], inside[half:]] if half else [inside, inside]
    return batches


def counted(rolled: Rolled) -> dict[str, Any]:
    """Return a step's numbers for its event."""
    graded = [each for group in rolled.answers for each in group.graded]
    sampled = [each for group in rolled.answers for each in group.sampled]
    rewards = [each.reward for each in graded if each.reward is not None]
    names = sorted({name for each in graded for name in each.parts})
    parts = {name: _mean([each.parts[name] for each in graded if name in each.parts]) for name in names}
    tokens = sum(len(each.tokens) for each in sampled)
    talks = [each for each in sampled if each.turns]
    faults = sum((Counter(each.faults) for each in talks), Counter[str]())
    return {
        "reward": _mean(rewards),
        "parts": parts,
        "groups": len(rolled.answers),
        "signal": int(rolled.groups.signal_P.sum()),
        "answers": len(sampled),
        "tokens": tokens,
        "cut": sum(each.stop in CUT for each in sampled) / max(1, len(sampled)),
        "outcomes": outcomes(graded),
        "seconds": rolled.sampling,
        "grading_seconds": rolled.grading,
        **({"turns": _mean([own_turns(each) for each in talks]), "faults": dict(faults)} if talks else {}),
    }


def own_turns(answer: Sampled) -> int:
    """Turns that the model took."""
    return sum(role == "assistant" for role, _ in answer.turns)


def lines(rolled: Rolled, tokenizer: Tokenizer) -> list[Answer]:
    """Return the lines of a step's rollout file (report/rollouts/answers.py)."""
    result: list[Any] = []
    rows = _rows(rolled.groups.advantage_PG)
    for place, (group, advantage_G) in enumerate(zip(rolled.answers, rows, strict=True)):
        prompt = text_of(group.row.messages[-1])
        for index, (answer, graded) in enumerate(zip(group.sampled, group.graded, strict=True)):
            result.append(
                {
                    "step": rolled.step,
                    "group": place,
                    "answer": index,
                    "row": group.example.row,
                    "prompt": prompt,
                    "text": answer.text,
                    "pieces": pieces(answer.tokens, tokenizer),
                    "logprobs": answer.log_p,
                    "advantage": advantage_G[index],
                    "stop": answer.stop,
                    **({"turns": answer.turns} if answer.turns else {}),
                    **graded.as_json(),
                }
            )
    return result


def _rows(values_PG: torch.Tensor) -> list[list[float]]:
    return [floats(values_G) for values_G in values_PG]


def pieces(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the text that became certain with each token, special ones too."""
    decoder = tokenizer.stream_decoder(skip_specials=False)
    each = [decoder.push(token) for token in tokens]
    return [*each[:-1], each[-1] + decoder.finish()] if each else []


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
