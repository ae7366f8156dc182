"""Batched generation with a KV cache.

Prompts wait in a queue. A free row of the cache takes the next one, and gives it back when the answer ends.
Those that join at the same time run in one packed pass, without padding (prefill). Then each step adds one
token per row. The n answers to a prompt share its prefill.

S sequences, J that join, P their prompts, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.units import format_bytes, plural
from unfreeze.data.packing.batches import pack
from unfreeze.data.store.examples import Example
from unfreeze.data.tokens.tokenizer import StreamDecoder
from unfreeze.generate.answer import Completion, Interrupted, Piece, Row, completed
from unfreeze.generate.queue import Queue
from unfreeze.generate.sampling import Sampling, choose, logprobs_of
from unfreeze.generate.steps import Step, Steps, shares_prompts, step_by_record
from unfreeze.generate.stops import StopText
from unfreeze.models import Decoder
from unfreeze.models.blocks.cache import Cache
from unfreeze.parallel.answers import Answers
from unfreeze.parallel.machine import hardware

log = logging.getLogger(__name__)
CACHE_SHARE = 0.5  # of the free memory; the rest is for the activations of a prefill
SLOTS = 2  # prompts that the cache holds, per prompt that all rows answer: a long answer keeps its prompt


class EngineTokenizer(Protocol):
    """The tokenizer methods that the engine needs."""

    named_size: int

    def stream_decoder(self) -> StreamDecoder: ...


class Engine:
    """Continues token prompts with a Decoder.

        tokenizer  decodes text, and says which ids have a name: rows of the head beyond them (padding,
                   docs/why/trust.md N5) are never sampled. None: ids only
        stop_ids   end a sequence when they are sampled
        steps      how a step is launched (generate/steps.py)
        agreed     maps the numbers chosen here (tokens, rows at once) to those used. Processes that share a
                   model's weights must use the same
        say        called with a line if answers have to wait for memory

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
        self.say: Callable[[str], None] = log.warning
        self.num_ids = (
            model.shape.vocab_size if tokenizer is None else min(tokenizer.named_size, model.shape.vocab_size)
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        max_rows: int | None = None,
        limits: Sequence[int] | None = None,
        experts: bool = False,
    ) -> list[Completion]:
        """Continue every prompt to its end: sampling.n answers each, those of the first prompt first.

        Arguments and errors as in `stream`. Ctrl-C raises Interrupted, a KeyboardInterrupt with the
        completions so far.
        """
        pieces: list[list[Piece]] = [[] for _ in range(len(prompts) * sampling.n)]
        try:
            for step in self.stream(prompts, sampling, max_rows=max_rows, limits=limits, experts=experts):
                for piece in step:
                    pieces[piece.row].append(piece)
        except KeyboardInterrupt:
            raise Interrupted([completed(row) for row in pieces]) from None
        return [completed(row) for row in pieces]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        max_rows: int | None = None,
        limits: Sequence[int] | None = None,
        experts: bool = False,
    ) -> Iterator[list[Piece]]:
        """Yield, per step, a Piece for each answer that is running; those that join come by themselves.

            max_rows  answers sampled at once; the others wait. None: as many as fit in half of the free
                      memory
            limits    maximum number of new tokens per prompt, in place of sampling.max_new_tokens
            experts   return the experts that were chosen for each token, with the last piece

        In float32 an answer doesn't depend on which others run beside it. If fewer positions are left than
        tokens may be sampled, it ends at the last of them, with stop_reason "window".
        Raises UserError at once for an empty prompt, an id outside the vocabulary, or a prompt that leaves no
        free position (shape.max_positions).
        """
        prompts = [list(prompt) for prompt in prompts]
        most = [sampling.max_new_tokens] * len(prompts) if limits is None else list(limits)
        self.check(prompts, sampling, most, max_rows)
        return self._run(prompts, most, sampling, sampling.keys(len(prompts)), max_rows, experts)

    def _run(
        self,
        prompts: list[list[int]],
        most: list[int],
        sampling: Sampling,
        keys: list[int],
        max_rows: int | None,
        experts: bool,
    ) -> Iterator[list[Piece]]:
        if not prompts:
            return
        rooms = [self.model.shape.max_positions - len(prompt) for prompt in prompts]

        def begin(index: int) -> Row:
            prompt = index // sampling.n
            limit, full = min((most[prompt], "length"), (rooms[prompt], "window"))
            decoder = self.stream_decoder(prompts[prompt][-1])
            return Row(
                index, prompt, limit, full, keys[index], self.stop_ids, decoder, StopText(sampling.stop)
            )

        news = [min(limit, room) for limit, room in zip(most, rooms, strict=True)]
        cache = self._cache(prompts, news, sampling.n, max_rows, experts)
        prefill, step = partial(self._prefill, cache), self.steps(self.model, cache)
        queue = Queue(prompts, sampling.n, self.model, cache, prefill, begin)
        while queue.rows or queue.waiting:
            # free rows take the next answers, whose first token comes with the prefill
            while (joined := queue.join()) is not None:
                yield self._chosen(queue, *joined, sampling)
            queue.leave()

            # one step of all that are not at their end
            if queue.rows:
                logits_SV = self._step(step, [row.tokens[-1] for row in queue.rows])
                yield self._chosen(queue, range(len(queue.rows)), logits_SV, sampling)

    def _chosen(
        self, queue: Queue, places: Sequence[int], logits_SV: Tensor, sampling: Sampling
    ) -> list[Piece]:
        """Choose a token for the rows at these places, whose logits these are."""
        rows, cache = [queue.rows[place] for place in places], queue.cache
        greedy = sampling.temperature == 0
        ids, kept_SV = choose(logits_SV, sampling, [] if greedy else [row.uniform() for row in rows])
        tokens = self.agreed(ids)
        logprobs = sampled = logprobs_of(logits_SV, tokens)
        if greedy:
            sampled = [0.0] * len(rows)
        elif kept_SV is not logits_SV:
            sampled = logprobs_of(kept_SV, tokens)
        pieces = [
            row.push(token, *logs) for row, token, *logs in zip(rows, tokens, logprobs, sampled, strict=True)
        ]
        if cache.routes is None:
            return pieces
        return [
            replace(piece, experts=cache.route(place)) if piece.stop_reason else piece
            for place, piece in zip(places, pieces, strict=True)
        ]

    def stream_decoder(self, before: int) -> StreamDecoder | None:
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
    def _prefill(self, cache: Cache, prompts: list[list[int]], rows: list[int]) -> Tensor:
        """Fill a row of the cache with each prompt, in one packed pass. -> the logits after it, [P, V]."""
        batch = batch_of(prompts, self.model.device)
        last_P = (batch.starts_S + torch.tensor(batch.lengths()) - 1).to(self.model.device)
        return self.model.logits(self.model.prefill(batch, cache, rows)[last_P])[:, : self.num_ids]

    @torch.no_grad()
    def _step(self, step: Step, tokens: list[int]) -> Tensor:
        return step(tokens)[:, : self.num_ids]

    def check(
        self, prompts: list[list[int]], sampling: Sampling, most: list[int], max_rows: int | None
    ) -> None:
        """Raise UserError for what `stream` cannot answer."""
        if sampling.stop and self.tokenizer is None:
            raise UserError(
                f"stop strings {list(sampling.stop)} need a tokenizer; this model has none",
                next="add tokenizer.json, or omit stop",
            )
        if len(most) != len(prompts) or min(most, default=1) < 1:
            raise ConfigError(
                f"limits {most} for {len(prompts)} prompts; there must be one for each, at least 1",
                next="limits=[20, 20] for two prompts",
            )
        if max_rows is not None and max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows}; it must be at least 1", next="leave it out")
        check_tokens(prompts, self.model.shape.vocab_size)
        positions, longest = self.model.shape.max_positions, max(map(len, prompts), default=0)
        if longest >= positions:
            raise UserError(
                f"a prompt has {longest} tokens, the model {positions} positions (max_position_embeddings):"
                " none is left for an answer",
                next="shorten the prompt",
            )

    def _cache(
        self, prompts: list[list[int]], news: list[int], n: int, max_rows: int | None, routes: bool
    ) -> Cache:
        """Return the cache for n answers to each prompt, of at most `news` tokens."""
        wanted, longest, new = n * len(prompts), max(map(len, prompts)), max(news)
        if n > 1 and shares_prompts(self.model, self.steps):
            rows = self._rows(wanted, new + -(-SLOTS * longest // n), max_rows)
            slots = min(len(prompts), SLOTS * -(-rows // n))
            return self.model.shared_cache((slots, longest), (rows, new), routes=routes)
        capacity = max(len(prompt) + limit for prompt, limit in zip(prompts, news, strict=True))
        return self.model.new_cache(self._rows(wanted, capacity, max_rows), capacity, routes=routes)

    def _rows(self, wanted: int, positions: int, max_rows: int | None) -> int:
        """Return the number of rows of the cache; say it if answers have to wait for memory."""
        if max_rows is not None or wanted == 1:
            return min(wanted, max_rows or 1)
        row = Answers(1, positions)
        cache = row.cache(self.model.cache_bytes(), self.model.state_bytes())
        fit = int(CACHE_SHARE * hardware(self.model.device).available) // (cache + row.logits(self.num_ids))
        (rows,) = self.agreed([max(1, min(wanted, fit))])
        if rows < wanted:
            self.say(f"{plural(wanted, 'row')}: {rows:,} at once ({format_bytes(rows * cache)} of cache)")
        return rows


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
