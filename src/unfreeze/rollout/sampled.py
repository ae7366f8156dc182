"""One sampled answer, as a step keeps it and as processes exchange it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from unfreeze.core.torch_types import from_numpy

if TYPE_CHECKING:
    from unfreeze.generate.answer import Completion


@dataclass(frozen=True)
class Sampled:
    """log_p: of each token when it was sampled, after temperature. experts: int16 [tokens - 1, L, K]."""

    tokens: list[int]
    text: str
    stop: str
    log_p: list[float]
    experts: Tensor | None = None

    @classmethod
    def of(cls, done: Completion) -> Sampled:
        """Take over what the engine returned."""
        return cls(done.tokens, done.text, done.stop_reason, done.sampled_logprobs, done.experts)


def as_text(answers: Sequence[Sampled]) -> list[list[Any]]:
    """Return plain values for JSON; floats survive it exactly."""
    return [[each.tokens, each.text, each.stop, each.log_p, *_packed(each.experts)] for each in answers]


def of_text(answers: Sequence[Sequence[Any]]) -> list[Sampled]:
    """Restore the result of as_text."""
    return [
        Sampled(tokens, text, stop, log_p, _unpacked(shape, ids))
        for tokens, text, stop, log_p, shape, ids in answers
    ]


def _packed(experts: Tensor | None) -> tuple[list[int] | None, str]:
    if experts is None:
        return None, ""
    return list(experts.shape), base64.b64encode(experts.numpy().tobytes()).decode()


def _unpacked(shape: Sequence[int] | None, ids: str) -> Tensor | None:
    if shape is None:
        return None
    numbers = np.frombuffer(base64.b64decode(ids), dtype=np.int16).copy()
    return from_numpy(numbers).view(*shape)
