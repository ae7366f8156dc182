"""Answers that a model samples while it trains: their number, and bytes of their KV cache and logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

LOGIT_BYTES = 48  # per logit of a row at the peak of sampling: sorted, cumulative, in float64


@dataclass(frozen=True)
class OfStep:
    """A step of a run with rewards, if every answer takes all its tokens.

    answers        all that it samples
    new_tokens     of each
    prompts        number of them, each read once
    prompt_tokens  of each
    steps          of the run; None: unknown
    """

    answers: int
    new_tokens: int
    prompts: int
    prompt_tokens: int
    steps: int | None = None

    @property
    def trained(self) -> int:
        """Tokens of its training passes: each answer comes with its prompt."""
        return self.answers * (self.prompt_tokens + self.new_tokens)


@dataclass(frozen=True)
class Answers:
    """Answers that are sampled at once.

    positions  of the cache, of all rows together
    step       all answers of a step; None: their seconds are not planned
    """

    rows: int
    positions: int
    step: OfStep | None = None

    def shared(self, processes: int) -> Answers:
        """One process's part of a step's answers."""
        if self.step is None:
            return self
        answers = -(-self.step.answers // processes)
        return replace(self, rows=min(self.rows, answers), step=replace(self.step, answers=answers))

    def cache(self, cached: int, state: int) -> int:
        """Bytes of the cache; `cached`: of a position, `state`: of a row whatever its length.

        (Decoder.cache_bytes and state_bytes.)
        """
        return self.positions * cached + self.rows * state

    def logits(self, vocab_size: int) -> int:
        """Bytes of the work on a step's logits."""
        return self.rows * vocab_size * LOGIT_BYTES
