"""Work for several cores at once, each with its own share and torch kept to one thread.

Where shares are large, that is better than all cores on each op.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

import torch

Part = TypeVar("Part")
_Run = tuple[Callable[[int, int], object], int, int, list[BaseException | None], SimpleQueue[None]]


def spread(shares: Sequence[Sequence[Part]], work: Callable[[Part, int], None]) -> None:
    """Call work(part, worker) for every part of every share, without gradients.

    Share by share in one thread each; one share alone stays in this thread.
    A share's parts keep their order, so what a worker sums up has the same bits at every call. An error is
    raised once all workers have stopped.
    """
    if len(shares) == 1:
        for part in shares[0]:
            work(part, 0)
        return

    @torch.no_grad()  # a setting of the thread
    def go(worker: int) -> None:
        for part in shares[worker]:
            work(part, worker)

    started = [_pool(len(shares)).submit(go, worker) for worker in range(len(shares))]
    # all, before an error or Ctrl-C is raised: a worker still at it would write into buffers of the next call
    interrupts: list[BaseException] = []
    while not all(future.done() for future in started):
        try:
            wait(started)
        except KeyboardInterrupt as interrupt:
            interrupts.append(interrupt)
    if interrupts:
        raise interrupts[0]
    for done in started:
        done.result()


def in_runs(parts: int, workers: int, work: Callable[[int, int], object]) -> None:
    """work(start, stop) for consecutive runs of 0 .. parts, equally long within one: a run in this thread,
    each other one in a thread of its own.

    Short runs are not worth handing over; a ThreadPoolExecutor takes several times as long for it
    (docs/why/decisions.md, 77). An error is raised once all have stopped.
    """
    cuts = [parts * worker // workers for worker in range(workers + 1)]
    answers: list[BaseException | None] = []
    done: SimpleQueue[None] = SimpleQueue()
    errors: list[BaseException] = []
    handed_over = 0
    try:
        for worker in range(1, workers):
            _runner(worker).put((work, cuts[worker], cuts[worker + 1], answers, done))
            handed_over += 1
        work(0, cuts[1])
    except BaseException as error:
        errors.append(error)

    # All, before an error is raised: a thread still at it would write into memory that is used again. So
    # Ctrl-C waits too, for the milliseconds that a loop takes.
    while len(answers) < handed_over:
        try:
            done.get()
        except KeyboardInterrupt as interrupt:
            errors.append(interrupt)
    errors += [answer for answer in answers if answer is not None]
    if errors:
        raise errors[0]


@functools.cache
def _runner(worker: int) -> SimpleQueue[_Run]:
    """What is put here is done by a thread that lives as long as the process."""
    jobs: SimpleQueue[_Run] = SimpleQueue()

    def serve() -> None:
        while True:
            _do(*jobs.get())

    Thread(target=serve, name=f"loops {worker}", daemon=True).start()
    return jobs


def _do(
    work: Callable[[int, int], object],
    start: int,
    stop: int,
    answers: list[BaseException | None],
    done: SimpleQueue[None],
) -> None:
    """A run of another thread, and its answer. Nothing of it stays with the thread, which waits for the next
    one: `work` holds all tensors of the loop."""
    answer = None
    try:
        work(start, stop)
    except BaseException as error:
        answer = error
    del work
    answers.append(answer)
    done.put(None)


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that live as long as the process and keep torch to one core each.

    torch.mm and the numba loops release Python's lock.
    """
    wanted = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "cores", torch.set_num_threads, (1,))
    for started in [pool.submit(time.sleep, 0.01) for _ in range(workers)]:
        started.result()
    torch.set_num_threads(wanted)  # the setting of a thread, but also what threads begin with that come later
    return pool


for _threads in (_runner, _pool):  # a forked process has none of them
    os.register_at_fork(after_in_child=_threads.cache_clear)
