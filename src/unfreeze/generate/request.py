"""A request to the engine that lives as long as its server (generate/live.py), and what it hands back.

V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.generate.answer import Piece
from unfreeze.generate.sampling import Sampling

Top = list[list[tuple[int, float]]]
"""For each token of an answer the likeliest ids at its place, and their log-probabilities in nats."""

Allow = Callable[[list[int]], Tensor | None]
"""The answer's tokens so far -> bool [V], True where an id may come next; None: every id may."""


class NothingAllowed(UserError):
    """An `allow` left no id that the model can sample."""


class Adapters(Protocol):
    """Several adapters of one model, one per sequence.

    An answer gets its version as it joins the rows that run, and keeps it to its end. Prefixes are shared
    within a version only: two versions that are equal give equal values.
    """

    def version(self, name: str) -> Hashable:
        """Return the present version of that adapter, and hold it until `leave`. Raises UserError."""
        ...

    def assign(self, versions: Sequence[Hashable]) -> None:
        """Before each pass: the version of each sequence of it, in order, as `version` returned them."""
        ...

    def leave(self, version: Hashable) -> None:
        """An answer that had this version has ended: called once for each `version`."""
        ...


class OneModel:
    """The Adapters of an engine without any: there is the model as it is, named ""."""

    def version(self, name: str) -> Hashable:
        if name:
            raise UserError(f"there is no adapter {name!r}: this engine has the model only")
        return ""

    def assign(self, versions: Sequence[Hashable]) -> None:
        """One model needs no assignment."""

    def leave(self, version: Hashable) -> None:
        """One model holds no versions."""


@dataclass
class PromptScores:
    """The prompt as the model scores it.

    logprobs  of each prompt token but the first, in nats: log p(token i | tokens before it)
    top       the likeliest ids at the same places, `Request.top` of them
    """

    logprobs: list[float]
    top: Top


def _ignored(piece: Piece) -> None:
    """Nobody listens."""


def _waits() -> bool:
    """Somebody waits for the answers."""
    return False


@dataclass(eq=False)
class Request:
    """One request: sampling.n answers to a prompt.

    sampling         temperature, top_p, top_k, stop, n, and a seed for each answer or one for all
    most             new tokens of an answer; 0: none, for the prompt's scores alone
    experts          keep the chosen experts
    top              likeliest tokens to list at each place
    heard            called in the engine's thread with each token; Piece.row is the number of the answer
    gone             True once nobody waits for it; looked at before each step
    adapter          its name among the engine's Adapters; "": the model as it is
    allow            masks the ids of an answer; one for all answers, or one for each
    prompt_logprobs  score the prompt's tokens: `prompt_scores`, set before the answers are handed over
    logprobs         False: Piece.logprob may be NaN, which saves a sum over the vocabulary per token
    """

    prompt: list[int]
    sampling: Sampling
    most: int
    experts: bool = False
    top: int = 0
    heard: Callable[[Piece], None] = _ignored
    gone: Callable[[], bool] = _waits
    adapter: str = ""
    allow: Allow | Sequence[Allow | None] | None = None
    prompt_logprobs: bool = False
    logprobs: bool = True
    prompt_scores: PromptScores | None = field(default=None, init=False)

    def left(self) -> bool:
        """Return True once nobody waits for the answers."""
        return self.gone()

    def allows(self) -> list[Allow | None]:
        """Return the `allow` of each answer. Raises ConfigError unless there is one for each."""
        if self.allow is None or callable(self.allow):
            return [self.allow] * self.sampling.n
        if len(self.allow) != self.sampling.n:
            raise ConfigError(
                f"{len(self.allow)} allow for {self.sampling.n} answers: there must be one for each",
                next="one callable is for all of them",
            )
        return list(self.allow)


@dataclass(frozen=True)
class Load:
    """An engine at one moment, for metrics.

    running, filling, waiting   answers that get a token each step, that read their prompt, that wait
    rows, positions, cache      rows of the cache, positions of each, bytes
    most_running                most answers that ran at once
    prompt_tokens, reused       tokens of prompts so far, and those of them that were copied, not computed
    new_tokens, steps           sampled tokens, and steps, so far
    answered, failed, gone, refused   requests so far, by their end
    """

    running: int = 0
    filling: int = 0
    waiting: int = 0
    rows: int = 0
    positions: int = 0
    cache: int = 0
    most_running: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    new_tokens: int = 0
    steps: int = 0
    answered: int = 0
    failed: int = 0
    gone: int = 0
    refused: int = 0
