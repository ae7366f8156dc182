"""Batched generation with a KV cache.

The prefill runs all prompts in one packed pass, without padding. Then each step adds one token per row, and
finished rows leave the batch.

T tokens of all prompts end to end, S sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.core.errors import UserError
from unfreeze.data.packing.batches import pack
from unfreeze.data.store.examples import Example
from unfreeze.data.tokens.tokenizer import StreamDecoder
from unfreeze.generate.sampling import Chooser, Sampling
from unfreeze.generate.steps import Step, Steps, step_by_record
from unfreeze.generate.stops import StopText
from unfreeze.models import Decoder
from unfreeze.models.blocks.passes import Cache

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Piece:
    """One sampled token of prompt `row`, and the text that can be shown now.

    text           whole characters, never part of a stop string; often ""
    finish_reason  None while the row continues; then "stop" (a stop id, a stop string) or "length"
                   (max_new_tokens, no position left)
    logprob        log-probability of the token in nats over all ids that can be sampled, before
                   temperature, top-k and top-p
    """

    row: int
    token: int
    text: str
    finish_reason: FinishReason | None
    logprob: float = field(default=math.nan, compare=False)


@dataclass(frozen=True)
class Completion:
    """Everything sampled for one prompt.

    tokens    every sampled id, including a stop id
    text      ends before the stop id or stop string
    logprobs  one per token, as in Piece; empty if the sampler doesn't know them
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float] = field(default_factory=list, compare=False)


class Sampler(Protocol):
    """Continues token prompts: the local Engine, or a client of an endpoint."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """Return a completion per prompt, in the prompts' order."""
        ...


class EngineTokenizer(Protocol):
    """The tokenizer methods that the engine needs."""

    named_size: int

    def stream_decoder(self) -> StreamDecoder: ...


@dataclass
class _Row:
    """A sequence being continued."""

    index: int
    limit: int
    stop_ids: frozenset[int]
    decoder: StreamDecoder | None
    stops: StopText
    tokens: list[int] = field(default_factory=list)

    def push(self, token: int) -> Piece:
        """Append a sampled token; return its Piece."""
        self.tokens.append(token)
        if token in self.stop_ids:
            return self._last(token, "", "stop")
        text, stopped = self.stops.push(self.decoder.push(token)) if self.decoder is not None else ("", False)
        if stopped:
            return Piece(self.index, token, text, "stop")
        if len(self.tokens) == self.limit:
            return self._last(token, text, "length")
        return Piece(self.index, token, text, None)

    def _last(self, token: int, text: str, reason: FinishReason) -> Piece:
        """Return the last piece with held-back text: the start of a stop string, half a character."""
        if self.decoder is not None:
            rest, stopped = self.stops.push(self.decoder.finish())
            text += rest if stopped else rest + self.stops.flush()
        return Piece(self.index, token, text, reason)


class Engine:
    """Continues token prompts with a Decoder.

        tokenizer  decodes text, and says which ids have a name: rows of the head beyond them (padding,
                   docs/why/trust.md N5) are never sampled. None: ids only
        stop_ids   end a sequence when they are sampled
        steps      how a step is launched (generate/steps.py)
        agreed     maps the tokens chosen here to those used. Processes that share a model's weights must use
                   the same

    Nothing is kept between calls, so the model's weights may change between them.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        tokenizer: EngineTokenizer | None = None,
        stop_ids: frozenset[int] = frozenset(),
        steps: Steps = step_by_record,
    ):
        self.model, self.tokenizer, self.stop_ids, self.steps = model, tokenizer, stop_ids, steps
        self.agreed: Callable[[list[int]], list[int]] = list
        self.num_ids = (
            model.shape.vocab_size if tokenizer is None else min(tokenizer.named_size, model.shape.vocab_size)
        )

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """Continue every prompt to its end. Errors as in `stream`."""
        pieces: list[list[Piece]] = [[] for _ in prompts]
        for step in self.stream(prompts, sampling):
            for piece in step:
                pieces[piece.row].append(piece)
        return [
            Completion(
                [p.token for p in row],
                "".join(p.text for p in row),
                row[-1].finish_reason or "length",
                [p.logprob for p in row],
            )
            for row in pieces
        ]

    def stream(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[list[Piece]]:
        """Yield, per step, a Piece for each prompt still running.

        If fewer than max_new_tokens positions are left, the row ends at the last of them, with finish_reason
        "length".
        Raises UserError at once for an empty prompt, an id outside the vocabulary, or a prompt that leaves no
        free position (shape.max_positions).
        """
        prompts = [list(prompt) for prompt in prompts]
        return self._run(prompts, self._limits(prompts, sampling), sampling)

    def _run(self, prompts: list[list[int]], limits: list[int], sampling: Sampling) -> Iterator[list[Piece]]:
        if not prompts:
            return
        rows = [
            _Row(index, limit, self.stop_ids, self._decoder(prompt[-1]), StopText(sampling.stop))
            for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        chooser = Chooser(sampling, len(rows))

        # prefill: all prompts in one packed pass fill the KV cache
        longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        cache = self.model.new_cache(len(rows), longest)
        logits_SV, step = self._prefill(prompts, cache), self.steps(self.model, cache)

        # decode: choose, yield, drop finished rows, one step of the model
        while True:
            tokens = self.agreed(chooser.choose(logits_SV, [row.index for row in rows]))
            logprobs = logprobs_of(logits_SV, tokens)
            pieces = [
                replace(row.push(token), logprob=logprob)
                for row, token, logprob in zip(rows, tokens, logprobs, strict=True)
            ]
            yield pieces
            running = [i for i, piece in enumerate(pieces) if piece.finish_reason is None]
            if not running:
                return
            if len(running) < len(rows):
                order = cache.keep(running)
                rows, tokens = [rows[i] for i in order], [tokens[i] for i in order]
            logits_SV = self._step(step, tokens)

    def _decoder(self, before: int) -> StreamDecoder | None:
        """Return a stream decoder that has seen the id before the first new one.

        Decoders drop the space before a text's first token, but the first new token does not start the text.
        """
        if self.tokenizer is None:
            return None
        decoder = self.tokenizer.stream_decoder()
        if before < self.num_ids:
            decoder.push(before)
        return decoder

    # no_grad is around these two calls, not around the generator, because the caller's own grad mode must
    # hold at every yield
    @torch.no_grad()
    def _prefill(self, prompts: list[list[int]], cache: Cache) -> Tensor:
        batch = batch_of(prompts, self.model.device)
        last_S = (batch.starts_S + torch.tensor(batch.lengths()) - 1).to(self.model.device)
        return self.model.logits(self.model.prefill(batch, cache)[last_S])[:, : self.num_ids]

    @torch.no_grad()
    def _step(self, step: Step, tokens: list[int]) -> Tensor:
        return step(tokens)[:, : self.num_ids]

    def _limits(self, prompts: list[list[int]], sampling: Sampling) -> list[int]:
        """Return the maximum number of new tokens per prompt."""
        if sampling.stop and self.tokenizer is None:
            raise UserError(
                f"stop strings {list(sampling.stop)} need a tokenizer; this model has none",
                next="add tokenizer.json, or omit stop",
            )
        check_tokens(prompts, self.model.shape.vocab_size)
        positions, longest = self.model.shape.max_positions, max(map(len, prompts), default=0)
        if longest >= positions:
            raise UserError(
                f"a prompt has {longest} tokens, the model {positions} positions (max_position_embeddings):"
                " none is left for an answer",
                next="shorten the prompt",
            )
        return [min(sampling.max_new_tokens, positions - len(prompt)) for prompt in prompts]


def logprobs_of(logits_SV: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return log softmax(logits_s)[tokens_s] for each row, in float32."""
    chosen_S = logits_SV.gather(1, torch.tensor(tokens, device=logits_SV.device)[:, None])[:, 0]
    return (chosen_S - logits_SV.logsumexp(-1)).tolist()


def check_tokens(sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise UserError for an empty sequence, or for the first id that has no row in the embedding."""
    for index, tokens in enumerate(sequences):
        if not tokens:
            raise UserError(
                f"sequence {index} of {len(sequences)} is empty; it needs at least one token",
                next="start with the BOS id",
            )
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            place = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
            raise UserError(
                f"sequence {index}, position {place}: token id {tokens[place]} is outside the vocabulary 0 to"
                f" {vocab_size - 1}"
            )


def batch_of(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Batch:
    """Pack token sequences end to end, without targets: for scoring and generation."""
    return pack([Example(tokens, [0.0] * len(tokens)) for tokens in sequences]).to(device)
