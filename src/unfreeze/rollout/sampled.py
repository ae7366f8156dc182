"""One sampled answer, as a step keeps it and as processes exchange it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unfreeze.rollout.reward import Graded

if TYPE_CHECKING:
    from unfreeze.generate.answer import Completion


@dataclass
class Sample:
    """Ids in the order that the model was fed: one example to train on.

    sampled  True for each id that the model wrote itself
    log_p    of each of these when it was sampled, after temperature
    experts  int16 [fewer than ids, L, K]: of each id, those chosen when the model first read it
    """

    ids: list[int]
    sampled: list[bool] = field(default_factory=list[bool])
    log_p: list[float] = field(default_factory=list[float])
    experts: Tensor | None = None

    def __post_init__(self) -> None:
        self.sampled = self.sampled or [False] * len(self.ids)

    def add(
        self, ids: Sequence[int], *, sampled: bool, log_p: Sequence[float] = (), experts: Tensor | None = None
    ) -> None:
        """Append ids. experts: of all ids read so far; those of ids that were read before are kept."""
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.log_p += log_p
        if experts is not None:
            before = experts[:0] if self.experts is None else self.experts
            self.experts = torch.cat([before, experts[len(before) :]])

    def last_turn(self) -> list[int]:
        """Return the sampled ids at the end."""
        begin = len(self.ids)
        while begin and self.sampled[begin - 1]:
            begin -= 1
        return self.ids[begin:]


@dataclass(frozen=True)
class Sampled:
    """One answer, of one turn or of several with an environment.

    tokens   sampled ids of all turns
    text     of the last turn
    log_p    of each token when it was sampled, after temperature
    experts  int16 [tokens - 1, L, K], of an answer of one turn
    fed      of several turns: examples to train on (turns.py); [] for one turn
    turns    [role, text] of each turn, to read
    faults   kinds of errors in calls of tools -> their number
    graded   its environment's reward
    """

    tokens: list[int]
    text: str
    stop: str
    log_p: list[float]
    experts: Tensor | None = None
    fed: list[Sample] = field(default_factory=list[Sample])
    turns: list[list[str]] = field(default_factory=list[list[str]])
    faults: dict[str, int] = field(default_factory=dict[str, int])
    graded: Graded | None = None

    @classmethod
    def of(cls, done: Completion) -> Sampled:
        """Take over what the engine returned."""
        return cls(done.tokens, done.text, done.stop_reason, done.sampled_logprobs, done.experts)

    def examples(self, prompt: Sequence[int]) -> list[Sample]:
        """Return the examples to train on; [] without a sampled token."""
        if self.fed or not self.tokens:
            return self.fed
        own = [False] * len(prompt) + [True] * len(self.tokens)
        return [Sample([*prompt, *self.tokens], own, self.log_p, self.experts)]


def as_text(answers: Sequence[Sampled]) -> list[dict[str, Any]]:
    """Return plain values for JSON; floats survive it exactly."""
    return [
        {
            **vars(each),
            "experts": _packed(each.experts),
            "fed": [{**vars(fed), "experts": _packed(fed.experts)} for fed in each.fed],
            "graded": each.graded and each.graded.as_json(),
        }
        for each in answers
    ]


def of_text(answers: Sequence[Mapping[str, Any]]) -> list[Sampled]:
    """Restore the result of as_text."""
    return [
        Sampled(
            **{
                **each,
                "experts": _unpacked(each["experts"]),
                "fed": [Sample(**{**fed, "experts": _unpacked(fed["experts"])}) for fed in each["fed"]],
                "graded": each["graded"] and Graded(**each["graded"]),
            }
        )
        for each in answers
    ]


def _packed(experts: Tensor | None) -> list[Any] | None:
    if experts is None:
        return None
    return [list(experts.shape), base64.b64encode(experts.numpy().tobytes()).decode()]


def _unpacked(packed: Sequence[Any] | None) -> Tensor | None:
    if packed is None:
        return None
    shape, ids = packed
    numbers = np.frombuffer(base64.b64decode(ids), dtype=np.int16).copy()
    return torch.from_numpy(numbers).view(*shape)
