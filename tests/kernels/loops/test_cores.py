"""Runs of parts in several threads: each part once, errors once all have stopped, and after a fork too."""

import os

import pytest

from unfreeze.kernels.loops.cores import in_runs


@pytest.mark.parametrize("parts, workers", [(1, 1), (5, 2), (5, 5), (7, 3), (100, 8)])
def test_runs_cover_all_parts_once_and_are_equally_long_within_one(parts, workers):
    runs = []
    in_runs(parts, workers, lambda start, stop: runs.append((start, stop)))
    assert sorted(part for run in runs for part in range(*run)) == list(range(parts))
    lengths = [stop - start for start, stop in runs]
    assert len(runs) == workers and max(lengths) - min(lengths) <= 1


def test_an_error_of_another_thread_is_raised_once_all_have_stopped():
    stopped = []

    def work(start, stop):
        if start:
            raise ValueError(start)
        stopped.append(start)

    with pytest.raises(ValueError, match="2"):
        in_runs(4, 2, work)
    assert stopped == [0]


def test_a_forked_process_starts_threads_of_its_own():
    """Control arm by construction: with its parent's queues it would wait for ever, and alarm() ends it."""
    in_runs(4, 2, lambda start, stop: None)
    child = os.fork()
    if not child:
        import signal

        signal.alarm(20)
        in_runs(4, 2, lambda start, stop: None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
