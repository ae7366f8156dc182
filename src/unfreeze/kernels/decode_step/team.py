"""The loop that every core runs over a recorded step: take the next job of an operation until none is left.

No core waits for another inside an operation, and one that comes late (a busy machine) holds nobody up: an
operation is over when its jobs are done, whoever did them. Operations that do not read each other's results
follow without a wait.
"""

from __future__ import annotations

import numpy as np

from unfreeze.kernels.decode_step.atomic import fetch_add, give_way, integers, pause, read
from unfreeze.kernels.decode_step.pointer import call_operation
from unfreeze.kernels.loops.numba_options import inner, serial

JOBS, OF_ROWS, COUNT, FIRST, ARGUMENTS = 1, 2, 3, 4, 8
"""Columns of the table before an operation's own arguments. Column 0: its address (pointer.py).

JOBS       number of jobs, per sequence if OF_ROWS is 1, and times the int64 at address COUNT if that isn't 0
FIRST      the operation waits until all operations from this one on are done; its own number: for none
"""
PATIENCE = 2000  # turns of spinning, some 40 µs, before a thread lets others have its core


@inner
def _jobs(a, rows):
    jobs = a[JOBS] * (rows if a[OF_ROWS] else 1)
    return jobs * integers(a[COUNT], 1)[0] if a[COUNT] else jobs


@serial
def work(like, table, numbers, begin, end, rows, counters):
    """Run operations begin .. end - 1 of the table; called once by each thread.

    table int64 [operations, columns], numbers float32 [operations, 3]. counters int64: two per operation,
    all 0 before the step: jobs taken, and jobs done.
    Returns the number of jobs that raised, for want of memory.
    """
    done = np.empty(end, np.int64)  # jobs of each operation
    counter, failed = counters.ctypes.data, 0
    for i in range(begin, end):
        a = table[i]
        for before in range(max(a[FIRST], begin), i):  # what came before `begin` is done
            turns = 0
            while read(counter + 16 * before + 8) < done[before]:
                turns += 1
                if turns < PATIENCE:
                    pause()
                else:
                    give_way()
        jobs = _jobs(a, rows)
        done[i] = jobs
        arguments, floats = a[ARGUMENTS:].ctypes.data, numbers[i].ctypes.data
        while True:
            job = fetch_add(counter + 16 * i, 1)
            if job >= jobs:
                break
            failed += call_operation(a[0], like, job, rows, arguments, floats)
            fetch_add(counter + 16 * i + 8, 1)
    for before in range(begin, end):
        while read(counter + 16 * before + 8) < done[before]:
            give_way()
    return failed
