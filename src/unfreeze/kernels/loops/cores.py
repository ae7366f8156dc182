"""Runs work on several cores at once, each with its own share and torch limited to one thread.

If shares are large, that is faster than using all cores for each op.
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

    Each share runs in one thread; a single share stays in this thread. The parts of a share keep their order,
    so a worker's sums are bit-identical at every call. An error is raised once all workers have stopped.
    """
    if len(shares) == 1:
        for part in shares[0]:
            work(part, 0)
        return

    @torch.no_grad()  # grad mode is a per-thread setting
    def go(worker: int) -> None:
        for part in shares[worker]:
            work(part, worker)

    started = [_pool(len(shares)).submit(go, worker) for worker in range(len(shares))]
    # wait for all before raising an error or Ctrl-C: a worker still running would write into the next call's
    # buffers
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
    """Call work(start, stop) for consecutive runs of 0 .. parts, whose lengths differ by at most one.

    One run stays in this thread; each other one runs in a thread of its own. Not for short runs: the
    hand-over costs too much. A ThreadPoolExecutor takes several times as long for it (docs/why/decisions.md,
    77). An error is raised once all have stopped.
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

    # Wait for all before raising an error: a thread still running would write into memory that is used again.
    # So Ctrl-C waits too, for the milliseconds that a loop takes.
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
    """A queue whose jobs run in a thread that lives as long as the process."""
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
    """Run another thread's part and report back.

    The thread keeps no reference while it waits for the next part: `work` holds all tensors of the loop.
    """
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
    """Threads that live as long as the process and limit torch to one core each.

    torch.mm and the numba loops release the GIL.
    """
    wanted = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "cores", torch.set_num_threads, (1,))
    for started in [pool.submit(time.sleep, 0.01) for _ in range(workers)]:
        started.result()
    torch.set_num_threads(wanted)  # a per-thread setting, but also the default of threads started later
    return pool


for _threads in (_runner, _pool):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_threads.cache_clear)
