"""An answer while it is sampled, and when it has ended: pieces, reasons to stop, completions.

L MoE layers, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from unfreeze.core.draws import uniform
from unfreeze.data.tokens.tokenizer import StreamDecoder
from unfreeze.generate.stops import StopText

FinishReason = Literal["stop", "length"]
StopReason = Literal["end", "stop word", "length", "window", "interrupted"]
"""end: a stop id. stop word: a stop string. length: max_new_tokens. window: the model has no position left.
interrupted: Ctrl-C."""


def finish_reason(stop_reason: StopReason) -> FinishReason:
    """Return OpenAI's name for the reason: "length" if the answer was cut, "stop" otherwise."""
    return "length" if stop_reason in ("length", "window") else "stop"


@dataclass(frozen=True)
class Piece:
    """One sampled token, and the text that can be shown now.

    row              index of the answer: prompt · n + answer
    text             whole characters, never part of a stop string; often ""
    stop_reason      None while the answer continues
    logprob          log-probability of the token in nats over all ids that can be sampled, before
                     temperature, top-k and top-p
    sampled_logprob  the same after them: of the distribution it was drawn from. Greedy: 0
    experts          of the last piece, if asked for: as in Completion
    top              if asked for: the likeliest ids at this place and their log-probabilities, as logprob
    """

    row: int
    token: int
    text: str
    stop_reason: StopReason | None
    logprob: float = field(default=math.nan, compare=False)
    sampled_logprob: float = field(default=math.nan, compare=False)
    experts: Tensor | None = field(default=None, compare=False, repr=False)
    top: Sequence[tuple[int, float]] = field(default=(), compare=False, repr=False)

    @property
    def finish_reason(self) -> FinishReason | None:
        """OpenAI's name for stop_reason; None while the answer continues."""
        return None if self.stop_reason is None else finish_reason(self.stop_reason)


@dataclass(frozen=True)
class Completion:
    """One answer.

    tokens            every sampled id, including a stop id
    text              ends before the stop id or stop string
    logprobs          one per token, as in Piece
    sampled_logprobs  one per token, as in Piece
    experts           if asked for: the experts that each MoE layer chose for every token of prompt and
                      answer but the last, which the model never read. int16 [tokens - 1, L, K]
    """

    tokens: list[int]
    text: str
    stop_reason: StopReason
    logprobs: list[float] = field(default_factory=list, compare=False)
    sampled_logprobs: list[float] = field(default_factory=list, compare=False)
    experts: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def finish_reason(self) -> FinishReason:
        """OpenAI's name for stop_reason."""
        return finish_reason(self.stop_reason)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while answers were sampled. `completions`: what is there, one per answer, some still empty."""

    def __init__(self, completions: list[Completion]):
        super().__init__()
        self.completions = completions


def completed(pieces: Sequence[Piece]) -> Completion:
    """Join the pieces of one answer; if its last one is missing, it was interrupted."""
    last = pieces[-1] if pieces else None
    return Completion(
        [piece.token for piece in pieces],
        "".join(piece.text for piece in pieces),
        (last and last.stop_reason) or "interrupted",
        [piece.logprob for piece in pieces],
        [piece.sampled_logprob for piece in pieces],
        last and last.experts,
    )


@dataclass
class Row:
    """An answer that is being sampled.

    index, prompt  number of the answer and of its prompt
    limit, full    maximum number of tokens, and the reason to stop there
    key            what its random numbers are made of
    """

    index: int
    prompt: int
    limit: int
    full: StopReason
    key: int
    stop_ids: frozenset[int]
    decoder: StreamDecoder | None
    stops: StopText
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def uniform(self) -> float:
        """Return the random number of the next token."""
        return uniform(self.key, len(self.tokens))

    def push(self, token: int, logprob: float, sampled_logprob: float) -> Piece:
        """Append a sampled token; return its Piece."""
        text, reason = self._push(token)
        self.ended = reason is not None
        return Piece(self.index, token, text, reason, logprob, sampled_logprob)

    def _push(self, token: int) -> tuple[str, StopReason | None]:
        self.tokens.append(token)
        if token in self.stop_ids:
            return self._rest(), "end"
        text, stopped = self.stops.push(self.decoder.push(token)) if self.decoder is not None else ("", False)
        if stopped:
            return text, "stop word"
        return (text + self._rest(), self.full) if len(self.tokens) == self.limit else (text, None)

    def _rest(self) -> str:
        """Return the text that was held back: the start of a stop string, half a character."""
        if self.decoder is None:
            return ""
        rest, stopped = self.stops.push(self.decoder.finish())
        return rest if stopped else rest + self.stops.flush()
