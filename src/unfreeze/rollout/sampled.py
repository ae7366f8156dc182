"""One sampled answer, as a step keeps it and as processes exchange it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from unfreeze.core.torch_types import from_numpy
from unfreeze.data.tokens.transcript import Sample
from unfreeze.rollout.reward import Graded

if TYPE_CHECKING:
    from unfreeze.generate.answer import Completion


@dataclass(frozen=True)
class Sampled:
    """One answer, of one turn or of several with an environment.

    tokens   sampled ids of all turns
    text     of the last turn
    log_p    of each token when it was sampled, after temperature
    experts  int16 [tokens - 1, L, K], of an answer of one turn
    fed      of several turns: examples to train on (data/tokens/transcript.py); [] for one turn
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
    return [_restored(each) for each in answers]


def _restored(answer: Mapping[str, Any]) -> Sampled:
    own: dict[str, Any] = {**answer, "experts": _unpacked(answer["experts"])}
    own["graded"] = answer["graded"] and Graded(**answer["graded"])
    fed: list[dict[str, Any]] = [{**each, "experts": _unpacked(each["experts"])} for each in answer["fed"]]
    own["fed"] = [Sample(**each) for each in fed]
    return Sampled(**own)


def _packed(experts: Tensor | None) -> list[Any] | None:
    if experts is None:
        return None
    return [list(experts.shape), base64.b64encode(experts.numpy().tobytes()).decode()]


def _unpacked(packed: Sequence[Any] | None) -> Tensor | None:
    if packed is None:
        return None
    shape, ids = packed
    numbers = np.frombuffer(base64.b64decode(ids), dtype=np.int16).copy()
    return from_numpy(numbers).view(*shape)
