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
_Run = tuple[Callable[[int, int], object], int, int, SimpleQueue[BaseException | None]]


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
    # all, before an error is raised: a worker still at it would write into buffers that the next call uses
    wait(started)
    for done in started:
        done.result()


def in_runs(parts: int, workers: int, work: Callable[[int, int], object]) -> None:
    """work(start, stop) for consecutive runs of 0 .. parts, equally long within one: a run in this thread,
    each other one in a thread of its own.

    For runs of a tenth of a millisecond and more: handing one over takes 30 microseconds (two cores of an AMD
    EPYC), where a ThreadPoolExecutor takes 100 to 140. An error is raised once all have stopped.
    """
    cuts = [parts * worker // workers for worker in range(workers + 1)]
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    for worker in range(1, workers):
        _runner(worker).put((work, cuts[worker], cuts[worker + 1], done))
    try:
        work(0, cuts[1])
    finally:  # all, before an error is raised, as in `spread`
        errors = [error for error in (done.get() for _ in range(1, workers)) if error is not None]
    if errors:
        raise errors[0]


@functools.cache
def _runner(worker: int) -> SimpleQueue[_Run]:
    """What is put here is done by a thread that lives as long as the process."""
    jobs: SimpleQueue[_Run] = SimpleQueue()

    def serve() -> None:
        while True:
            work, start, stop, done = jobs.get()
            try:
                work(start, stop)
                done.put(None)
            except BaseException as error:
                done.put(error)

    Thread(target=serve, name=f"loops {worker}", daemon=True).start()
    return jobs


os.register_at_fork(after_in_child=_runner.cache_clear)  # a forked process has none of these threads


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
