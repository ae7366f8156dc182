"""The answers of one call: those that wait, and those that have a row of the cache.

A prompt is filled once. Its row is then given to the other answers to it: at once, or when they join later,
from any answer to it that is still in the cache. Answers join in order, so at most one prompt has answers on
both sides, and one of its rows is there: the row that gives its place to the next answer, if no other.

J rows that join together, P prompts of theirs, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unfreeze.generate.answer import Row
from unfreeze.models import Decoder
from unfreeze.models.blocks.cache import Cache

PREFILL_TOKENS = 32_768  # of one packed pass: the activations of all its tokens are alive together


class Queue:
    """rows: the running answers, by place in the cache. waiting: those that come next.

    n          answers to each prompt
    prefill    (prompts, places) -> logits after each prompt [P, V]; fills these rows of the cache
    begin      number of an answer -> its Row
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        n: int,
        model: Decoder,
        cache: Cache,
        prefill: Callable[[list[list[int]], list[int]], Tensor],
        begin: Callable[[int], Row],
    ):
        self.prompts, self.n, self.model, self.cache = prompts, n, model, cache
        self.prefill, self.begin = prefill, begin
        self.rows: list[Row] = []
        self.waiting = deque(range(len(prompts) * n))
        self._after: dict[int, Tensor] = {}  # prompt with answers on both sides -> logits after it [V]
        cache.keep([])

    def ended(self) -> list[int]:
        return [place for place, row in enumerate(self.rows) if row.ended]

    def free(self) -> list[int]:
        """Return the places that an answer can take: of rows that have ended, then those behind all."""
        return self.ended() + list(range(len(self.rows), self.cache.rows))

    def leave(self) -> None:
        """Drop the rows that have ended."""
        running = [place for place, row in enumerate(self.rows) if not row.ended]
        if len(running) < len(self.rows):
            self.rows = [self.rows[place] for place in self.cache.keep(running)]

    def join(self) -> tuple[list[int], Tensor] | None:
        """Give free places to answers that wait. -> their places, and the logits after their prompts [J, V].

        They share a prompt that is in the cache, or get new prompts, filled in one pass. None: no answer
        waits, or there is no place for it.
        """
        if not self.waiting or not self.free():
            return None
        prompt = self.waiting[0] // self.n
        logits_V = self._after.pop(prompt, None)
        sources = [
            place
            for place, row in enumerate(self.rows)
            if row.prompt == prompt and self.model.holds(len(self.prompts[prompt]), self.cache.lengths[place])
        ]
        if logits_V is None or not sources:
            return self._join_new()

        # an ended row of the prompt is taken first: nothing is copied to it, and nothing over it
        free = sorted(self.free(), key=lambda place: place not in sources)
        source = free[0] if free[0] in sources else sources[0]
        places = [place for place in free if self._take(place, prompt)]
        self.cache.fork(source, places, len(self.prompts[prompt]))
        self._keep_for_later(prompt, logits_V)
        return places, logits_V.expand(len(places), -1)

    def _join_new(self) -> tuple[list[int], Tensor] | None:
        """Join with prompts of together at most PREFILL_TOKENS, or with one."""
        self.cache.release(self.ended())
        room = self.cache.room_for_prompts()
        if not room:
            return None
        groups: dict[int, list[int]] = {}  # prompt -> places
        tokens = 0
        for place in self.free():
            if not self.waiting:
                break
            prompt = self.waiting[0] // self.n
            if prompt not in groups:
                tokens += len(self.prompts[prompt])
                if groups and (tokens > PREFILL_TOKENS or len(groups) == room):
                    break
            self._take(place, prompt)
            groups.setdefault(prompt, []).append(place)

        logits_PV = self.prefill([self.prompts[p] for p in groups], [places[0] for places in groups.values()])
        for prompt, places in groups.items():
            self.cache.fork(places[0], places, len(self.prompts[prompt]))
        self._keep_for_later(list(groups)[-1], logits_PV[-1])
        counts_P = torch.tensor([len(places) for places in groups.values()], device=logits_PV.device)
        every = [place for places in groups.values() for place in places]
        return every, logits_PV.repeat_interleave(counts_P, dim=0, output_size=len(every))

    def _take(self, place: int, prompt: int) -> bool:
        """Let the next answer that waits take the place, if it answers `prompt`."""
        if not self.waiting or self.waiting[0] // self.n != prompt:
            return False
        row = self.begin(self.waiting.popleft())
        if place == len(self.rows):
            self.rows.append(row)
            self.cache.more(1)
        else:
            self.rows[place] = row
        return True

    def _keep_for_later(self, prompt: int, logits_V: Tensor) -> None:
        if self.waiting and self.waiting[0] // self.n == prompt:
            self._after[prompt] = logits_V.clone()
