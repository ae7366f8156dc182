"""Runs of parts in several threads: each part once, errors once all have stopped, and after a fork too."""

import os
import signal
import threading
import time
import weakref

import pytest

from unfreeze.kernels.loops.cores import in_runs, spread


@pytest.mark.parametrize("parts, workers", [(1, 1), (5, 2), (5, 5), (7, 3), (100, 8)])
def test_runs_cover_all_parts_once_and_are_equally_long_within_one(parts, workers):
    runs = []
    in_runs(parts, workers, lambda start, stop: runs.append((start, stop)))
    assert sorted(part for run in runs for part in range(*run)) == list(range(parts))
    lengths = [stop - start for start, stop in runs]
    assert len(runs) == workers and max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_an_error_is_raised_once_all_have_stopped(fails):
    """Run `fails` of three raises at once; the other two are still at it."""
    finished = []

    def work(start, stop):
        if start == fails:
            raise ValueError(start)
        time.sleep(0.05)
        finished.append(start)

    with pytest.raises(ValueError, match=str(fails)):
        in_runs(3, 3, work)
    assert sorted(finished) == sorted({0, 1, 2} - {fails})


@pytest.mark.parametrize("run", ["in_runs", "spread"])
def test_ctrl_c_waits_for_the_other_threads(run):
    """They write into memory that whoever catches it will use again. It is pressed when both are at work."""
    finished, both = [], threading.Barrier(2, timeout=20)

    def work(start, *_):
        both.wait()
        if start:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            finished.append(start)

    with pytest.raises(KeyboardInterrupt):
        in_runs(2, 2, work) if run == "in_runs" else spread([[0], [1]], work)
    assert finished == [1]


def test_a_thread_keeps_nothing_of_its_last_run():
    class Memory:
        pass

    memory = Memory()
    seen = weakref.ref(memory)
    in_runs(2, 2, lambda start, stop, memory=memory: None)
    del memory
    for _ in range(100):
        if seen() is None:
            return
        time.sleep(0.01)
    raise AssertionError("the thread still holds what its last run worked on")


@pytest.mark.parametrize("run", ["in_runs", "spread"])
def test_a_forked_process_starts_threads_of_its_own(run):
    """With its parent's threads it would wait for ever, and alarm() ends it."""

    def go():
        if run == "in_runs":
            in_runs(4, 2, lambda start, stop: None)
        else:
            spread([[0], [1]], lambda part, worker: None)

    go()
    child = os.fork()
    if not child:
        signal.alarm(20)
        go()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
