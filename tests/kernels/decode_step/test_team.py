"""The loop of a step: operations wait for what they read, each job runs once, whoever comes late."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unfreeze.kernels.decode_step import mixture, team
from unfreeze.kernels.decode_step.atomic import ARGUMENTS, fetch_add, floats, give_way, integers, read
from unfreeze.kernels.decode_step.pointer import Callee
from unfreeze.kernels.decode_step.program import Program, Row

TURNS = 2000  # of waiting for a signal that comes only if an operation does not wait


def late_write(like, job, rows, arguments, numbers):
    """Job 0 writes x = 7 once the signal is raised, or after a while. Other jobs do nothing."""
    a = integers(arguments, ARGUMENTS)
    x, signal = a[:2]
    if job == 0:
        turns = 0
        while read(signal) == 0 and turns < TURNS:
            turns += 1
            give_way()
        floats(x, 1)[0] = 7.0


def copy(like, job, rows, arguments, numbers):
    """y = x, and the signal is raised."""
    a = integers(arguments, ARGUMENTS)
    x, signal, y = a[:3]
    floats(y, 1)[0] = floats(x, 1)[0]
    fetch_add(signal, 1)


def count(like, job, rows, arguments, numbers):
    """Counts each of its jobs."""
    fetch_add(integers(arguments, ARGUMENTS)[0] + 8 * job, 1)


def fill(like, job, rows, arguments, numbers):
    """Fails for want of memory in one job."""
    wanted = integers(arguments, ARGUMENTS)[0]
    if job == wanted:
        np.empty(1 << 60, np.float32)[job] = 1


LATE, COPY, COUNT, FILL = map(Callee, (late_write, copy, count, fill))


def waiting(plant=None):
    """A program whose second operation reads what the first writes late: (program, x, y, signal)."""
    made = Program(1, torch.float32)
    x, y, signal = torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    addresses = [t.data_ptr() for t in (x, signal, y)]
    made.add(LATE, 4, False, addresses[:2], reads=[], writes=[x])
    made.add(COPY, 1, False, addresses, reads=[x], writes=[y])
    if plant is not None:
        plant(made)
    made.finish()
    return made, x, y, signal


def test_an_operation_waits_for_what_it_reads(threads):
    threads(4)
    made, x, y, signal = waiting()
    for _ in range(5):
        for each in (x, y, signal):
            each.zero_()
        made.run(1)
        assert x == 7 and y == 7


def test_control_a_missing_wait_is_seen(threads):
    threads(4)

    def none(made):
        made._operations[1].first = 1

    made, x, y, _ = waiting(none)
    made.run(1)
    assert x == 7 and y == 0


def counting(jobs=50, of_rows=False, rows=1, operations=3, count=0):
    made = Program(rows, torch.float32)
    counted = torch.zeros(operations, jobs * rows * 4, dtype=torch.int64)
    for i in range(operations):
        made.add(COUNT, jobs, of_rows, [counted[i].data_ptr()], writes=[counted], count=count)
    made.finish()
    return made, counted


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_each_job_runs_once(threads, number):
    threads(number)
    made, counted = counting()
    for turn in range(1, 4):
        made.run(1)
        assert (counted[:, :50] == turn).all() and (counted[:, 50:] == 0).all()


def test_jobs_of_rows_and_of_a_count(threads):
    """rows: those of this run, fewer than recorded. A count is read when the operation begins."""
    threads(3)
    made, counted = counting(jobs=5, of_rows=True, rows=4)
    for rows in (4, 2):
        counted.zero_()
        made.run(rows)
        assert (counted[:, : 5 * rows] == 1).all() and (counted[:, 5 * rows :] == 0).all()
    times = torch.tensor([3])
    made, counted = counting(jobs=5, count=times.data_ptr())
    made.run(1)
    assert (counted[:, :15] == 1).all() and (counted[:, 15:] == 0).all()
    times[0] = 0
    counted.zero_()
    made.run(1)
    assert not counted.any()
    with pytest.raises(ValueError, match="2 sequences in a step recorded for 1"):
        made.run(2)


def test_a_thread_that_comes_late_finds_nothing_to_do():
    made, counted = counting()
    arguments = (np.float32(0), made._tables[0], made._numbers, 0, 3, 1, made._counters)
    for _ in range(3):  # one after the other: the second and the third come when all is done
        assert team.work(*arguments) == 0
        assert (counted[:, :50] == 1).all()
    made._counters.fill(0)  # control: a new step
    assert team.work(*arguments) == 0
    assert (counted[:, :50] == 2).all()


def mixture_program(rows):
    """A layer with experts, attention's sums and products, on random numbers: (program, result)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    made = Program(rows, torch.float32)
    x = Row(draw(rows, 96) * 10, False)
    kept = x
    for _ in range(3):
        normed = made.norm(x, draw(96), 1e-5)
        attended = made.linear(normed, draw(96, 96), add=x)
        rule = mixture.Choice(2, 1, None, 1, 1, 1, True, False, None, 0.0, 0.0, 1.0)
        routed = mixture.route(made, made.linear(attended, draw(6, 96)), rule)
        weights = draw(6, 256, 96), draw(6, 96, 128)
        x = mixture.expert_mlp(made, attended, routed, *weights, None, gated=mixture.Gated(0), add=attended)
        made.reuse(x)
    made.finish()
    return made, x, kept


def test_any_number_of_threads_gives_the_same_bits(threads):
    made, x, first = mixture_program(7)
    threads(1)
    made.run(7)
    want = x.tensor.clone()
    assert want.isfinite().all()
    for number in range(2, 9):
        threads(number)
        for _ in range(3):
            x.tensor.zero_()
            made.run(7)
            assert torch.equal(x.tensor, want), number
    first.tensor[3] += 1e-3  # control: another input
    made.run(7)
    assert not torch.equal(x.tensor, want)


def test_fewer_rows_than_recorded(threads):
    """The rows that run are the first ones; the others keep what they hold."""
    threads(2)
    made, x, _ = mixture_program(7)
    made.run(7)
    want = x.tensor.clone()
    for rows in (1, 3, 4, 6):
        x.tensor.fill_(5)
        made.run(rows)
        torch.testing.assert_close(x.tensor[:rows], want[:rows], rtol=1e-5, atol=1e-5)
        assert (x.tensor[rows:] == 5).all()


@pytest.mark.parametrize("number", [1, 4])
def test_a_job_that_raises_is_a_memory_error(threads, number):
    threads(number)
    made = Program(1, torch.float32)
    fails, counted = torch.zeros(1, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    made.add(FILL, 8, False, [2])
    made.add(COUNT, 8, False, [counted.data_ptr()], reads=[fails], writes=[counted])
    made.finish()
    for turn in (1, 2):  # the others go on, and the next step can run
        with pytest.raises(MemoryError, match="a step of generation found no memory for its sums"):
            made.run(1)
        assert (counted == turn).all()
    for table in made._tables:
        table[0, team.ARGUMENTS] = -1  # control: no job raises
    made.run(1)
    assert (counted == 3).all()


def test_a_call_on_the_host_sees_all_before_it_and_nothing_after(threads):
    threads(4)
    made = Program(1, torch.float32)
    x, y, signal = torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    seen = []
    made.add(LATE, 4, False, [x.data_ptr(), signal.data_ptr()], writes=[x])
    made.call(lambda rows: seen.append((rows, float(x), float(y))))
    made.add(COPY, 1, False, [x.data_ptr(), signal.data_ptr(), y.data_ptr()], reads=[], writes=[y])
    made.finish()
    made.run(1)
    assert seen == [(1, 7.0, 0.0)] and y == 7
