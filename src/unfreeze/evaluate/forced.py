"""log p and rank of given tokens after given tokens, in packed passes that an interrupt does not lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unfreeze.evaluate.gap import scored_answers
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.tasks import Shown, unseen
from unfreeze.generate.model import Model

TOKENS = 4096  # of one pass; a single longer one runs alone


@dataclass(frozen=True)
class Forced:
    """log_p: nats of each token; ranks: how many ids are likelier at each."""

    log_p: list[float]
    ranks: list[int]

    @property
    def greedy(self) -> bool:
        """True if the model's greedy answer begins with these tokens."""
        return not any(self.ranks)


Asked = tuple[Sequence[int], Sequence[int]]
"""(tokens before, tokens to score)."""


def forced(
    model: Model, wanted: Sequence[Asked], kept: Kept, shown: Shown = unseen, *, most: int | None = None
) -> list[Forced]:
    """Return the score of each. most: sequences of one pass.

    Routing and precision are those of training; how sequences are packed changes rounding only.
    """
    keys = [kept.key("forced", list(before), list(tokens)) for before, tokens in wanted]
    missing = list({key: i for i, key in reversed(list(enumerate(keys))) if kept.get(key) is None}.values())
    done = len(wanted) - len(missing)
    for together in _passes(wanted, missing, most):
        scored = scored_answers(
            model.decoder, [wanted[i][0] for i in together], [wanted[i][1] for i in together]
        )
        for i, each in zip(together, scored, strict=True):
            kept.put(keys[i], [[log_p for log_p, _ in each], [rank for _, rank in each]])
        done += len(together)
        shown(done, len(wanted))
    return [Forced(*kept.get(key)) for key in keys]


def _passes(wanted: Sequence[Asked], missing: Sequence[int], most: int | None) -> Iterator[list[int]]:
    """Yield the numbers that run together, in order, at most TOKENS tokens."""
    together: list[int] = []
    tokens = 0
    for i in missing:
        size = len(wanted[i][0]) + len(wanted[i][1])
        if together and (tokens + size > TOKENS or len(together) == most):
            yield together
            together, tokens = [], 0
        together.append(i)
        tokens += size
    if together:
        yield together
