"""Work for several cores at once, each with its own share and torch kept to one thread.

Where shares are large, that is better than all cores on each op.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Part = TypeVar("Part")


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
    """work(start, stop) for consecutive runs of 0 .. parts, as long as each other within one; the first in
    this thread, each other one in a thread of its own."""
    cuts = [parts * worker // workers for worker in range(workers + 1)]
    runs = list(itertools.pairwise(cuts))
    started = [_pool(workers).submit(work, *run) for run in runs[1:]]
    try:
        work(*runs[0])
    finally:  # all, before an error is raised, as in `spread`
        wait(started)
    for done in started:
        done.result()


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
