"""One thread that owns the engine: requests wait in a queue, and what can run together is one batch.

A batch is taken as it stands: the engine starts all its prompts together, so a request that comes later waits
for the next one. Requests share a batch if they are sampled alike (Work.alike).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from unfreeze.generate.answer import Completion, Piece, completed
from unfreeze.generate.engine import Engine, batch_of
from unfreeze.generate.request import Request, Top
from unfreeze.generate.sampling import Sampling
from unfreeze.serve.request import Refused

LINGER = 0.01
"""Seconds without a new request after which a batch begins: requests that are sent together arrive so."""
LONGEST_LINGER = 0.1

@dataclass(eq=False)
class Work(Request):
    """A Request to the engine's thread, and the promise of its answers.

    done   the answers, and for each of them the likeliest ids at its tokens ([] unless `top`). Cancelled if
           nobody waits any more; whoever cancels it frees its rows at the next step
    """

    done: Future[tuple[list[Completion], list[Top]]] = field(
        default_factory=Future[tuple[list[Completion], list[Top]]]
    )

    def alike(self) -> tuple[object, ...]:
        """Return the part that a batch has in common."""
        sampling = self.sampling
        return sampling.temperature, sampling.top_p, sampling.stop, sampling.n, self.experts


class Speaker:
    """The thread of an engine, and its queue. Between batches nothing is kept, so weights may change.

    max_rows  answers sampled at once; None: as many as memory allows
    max_wait  requests that may wait
    """

    def __init__(self, engine: Engine, *, max_rows: int | None = None, max_wait: int = 1024):
        self.engine, self.max_rows = engine, max_rows
        self._waiting: queue.Queue[Work | None] = queue.Queue(max_wait)
        self._left: list[Work] = []  # taken from the queue, not in the batch that runs
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._closed = False
        self.batches: list[int] = []
        """Requests of each batch so far."""
        self._thread = threading.Thread(target=self._run, name="unfreeze-speaker", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Future[tuple[list[Completion], list[Top]]]:
        """Queue a request. Raises Refused (429) if too many wait, (503) after `close`."""
        with self._lock:
            if self._closed:
                raise Refused(503, "the endpoint is closed")
            try:
                self._waiting.put_nowait(work)
            except queue.Full:
                raise Refused(429, f"{self._waiting.maxsize} requests wait; try again later") from None
            self._idle.clear()
        return work.done

    def drain(self) -> None:
        """Wait until nothing runs and nothing waits: then the weights may change."""
        self._idle.wait()

    def close(self) -> None:
        """End the thread after the batch that runs; requests that wait are refused."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            try:
                self._answer(batch)
            except BaseException as error:  # this request's or the model's: the thread goes on
                for work in batch:
                    if not work.done.done():
                        work.done.set_exception(error)
        for work in self._left:
            work.done.set_exception(Refused(503, "the endpoint is closed"))
        self._idle.set()

    def _next(self) -> list[Work] | None:
        """Wait for requests. -> those of the oldest's kind; None at the end."""
        while True:
            if not self._left:
                with self._lock:
                    if self._waiting.empty():
                        self._idle.set()
                if not self._take(None):
                    return None
            until = time.monotonic() + LONGEST_LINGER
            while time.monotonic() < until:
                try:
                    if not self._take(LINGER):
                        return None
                except queue.Empty:
                    break
            for work in self._left:
                if work.gone():
                    work.done.cancel()
            kinds = [work.alike() for work in self._left if not work.done.cancelled()]
            alike = [work for work in self._left if kinds and work.alike() == kinds[0]]
            self._left = [work for work in self._left if kinds and work.alike() != kinds[0]]
            if batch := [work for work in alike if work.done.set_running_or_notify_cancel()]:
                self.batches.append(len(batch))
                return batch

    def _take(self, seconds: float | None) -> bool:
        """Move a request from the queue. -> False at the end. Raises queue.Empty after `seconds`."""
        work = self._waiting.get(timeout=seconds)
        if work is not None:
            self._left.append(work)
        return work is not None

    def _answer(self, batch: Sequence[Work]) -> None:
        first, n = batch[0].sampling, batch[0].sampling.n
        sampling = Sampling(
            max(work.most for work in batch),
            temperature=first.temperature,
            top_p=first.top_p,
            stop=first.stop,
            n=n,
            seeds=tuple(seed for work in batch for seed in work.sampling.seeds or ()),
        )
        steps = self.engine.stream(
            [work.prompt for work in batch],
            sampling,
            max_rows=self.max_rows,
            limits=[work.most for work in batch],
            experts=batch[0].experts,
        )
        pieces: list[list[Piece]] = [[] for _ in range(n * len(batch))]
        for step in steps:
            for piece in step:
                pieces[piece.row].append(piece)
                batch[piece.row // n].heard(piece)
        for i, work in enumerate(batch):
            answers = [completed(each) for each in pieces[n * i : n * (i + 1)]]
            tops = [self.likeliest(work.prompt, each.tokens, work.top) for each in answers if work.top]
            work.done.set_result((answers, tops))

    @torch.no_grad()
    def likeliest(self, prompt: list[int], tokens: list[int], count: int) -> Top:
        """Return the likeliest ids at the place of each token, before temperature, by a second pass."""
        model = self.engine.model
        hidden_TD = model.hidden(batch_of([[*prompt, *tokens]], model.device))
        logits_NV = model.logits(hidden_TD[len(prompt) - 1 : -1])[:, : self.engine.num_ids].float()
        top = logits_NV.log_softmax(-1).topk(min(count, self.engine.num_ids))
        return [
            list(zip(ids, values, strict=True))
            for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
