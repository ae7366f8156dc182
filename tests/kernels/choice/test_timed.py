"""Timing at a machine's first start, with a clock of the test's own: who runs, and when it ends."""

import contextlib

import pytest
import torch

from unfreeze.kernels.choice import timed
from unfreeze.kernels.choice.op import Candidate, Case, Op
from unfreeze.kernels.choice.timed import Cell, time_all

F32 = torch.float32


class Clock:
    """Stands still but for what a planted implementation says that it takes."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, seconds, function):
        """`function`, which compiles for a minute at its first call and then takes so many seconds."""
        called = []

        def implementation(x):
            self.now += seconds if called else 60.0
            called.append(x)
            return function(x)

        implementation.called = called
        return implementation


def cell(reference, *, bucket="any", named_on=(), against=None, **candidates):
    made = {
        name: Candidate(lambda part=part: part, lambda *_: "", named_on=named_on)
        for name, part in candidates.items()
    }
    case = Case(bucket, lambda d, t, g: (torch.randn(8, generator=g).to(d, t).requires_grad_(),))
    return Cell(Op("double", reference, made, (case,), {F32: 1e-6}, against=against), case, F32)


@pytest.fixture
def clock():
    return Clock()


def double(x):
    return 2 * x


@pytest.mark.parametrize(
    ("slow", "quick", "runs"),
    [
        (2e-3, 1e-3, "quick"),
        (1e-3, 0.96e-3, "reference"),  # 4 % are not worth it
        (1e-3, 1.2e-3, "reference"),
        (1e-3, 0.5, "reference"),
    ],
)
def test_the_faster_one_runs_if_it_gains_5_percent(clock, slow, quick, runs):
    (row,) = time_all([cell(clock.takes(slow, double), quick=clock.takes(quick, double))], clock=clock)
    assert row["runs"] == runs and row["us"]["reference"] == pytest.approx(slow * 1e6)
    assert row["us"][runs] <= 1.05 * row["us"]["reference"]
    assert (row["op"], row["dtype"], row["bucket"]) == ("double", "float32", "any")


def test_of_several_the_fastest(clock):
    times = {"a": 8e-4, "b": 3e-4, "c": 5e-4}
    made = {name: clock.takes(seconds, double) for name, seconds in times.items()}
    assert time_all([cell(clock.takes(1e-3, double), **made)], clock=clock)[0]["runs"] == "b"


def test_what_is_slow_is_not_called_again_and_again(clock):
    slow = clock.takes(0.3, double)
    time_all([cell(clock.takes(1e-3, double), slow=slow, quick=clock.takes(5e-4, double))], clock=clock)
    assert len(slow.called) == 2  # compiled, and one sample


@pytest.mark.parametrize(
    "wrong", [lambda x: 2.001 * x, lambda x: (2 * x)[:4], lambda x: x.sqrt_(), lambda x: 2 * x * torch.nan]
)
def test_a_wrong_one_does_not_run_however_fast(clock, wrong):
    (row,) = time_all([cell(clock.takes(1e-3, double), quick=clock.takes(1e-6, wrong))], clock=clock)
    assert row["runs"] == "reference" and row["us"].keys() == {"reference"} and row["wrong"]["quick"]


def test_a_wrong_gradient_is_seen(clock):
    def half_a_gradient(x):
        return x + x.detach()

    (row,) = time_all(
        [cell(clock.takes(1e-3, double), quick=clock.takes(1e-6, half_a_gradient))], clock=clock
    )
    assert row["runs"] == "reference" and "differs from plain torch" in row["wrong"]["quick"]


def test_compiling_is_not_counted_and_the_budget_is_kept(clock):
    """Each cell costs 0.1 s a call, so some of the 50 fit into 2 s; their minutes of compiling do not count."""
    cells = [
        cell(clock.takes(0.1, double), bucket=str(n), quick=clock.takes(0.05, double)) for n in range(50)
    ]
    rows = time_all(cells, seconds=2.0, clock=clock)
    assert [row["bucket"] for row in rows] == [str(n) for n in range(len(rows))] and 2 <= len(rows) <= 6
    compiled = sum(
        60.0 for c in cells for part in (c.op.reference, c.op.candidates["quick"].load()) if part.called
    )
    assert clock.now - compiled <= 2.0 + 0.1 * 50  # what is too dear is called once more, to see that


def test_the_first_cells_come_first_and_a_cheap_one_after_a_dear_one_is_still_timed(clock):
    dear = cell(clock.takes(1.0, double), bucket="dear", quick=clock.takes(0.5, double))
    cheap = cell(clock.takes(1e-3, double), bucket="cheap", quick=clock.takes(5e-4, double))
    kept, timed = time_all([dear, cheap], clock=clock)
    assert (kept["bucket"], kept["runs"], kept["untimed"]) == ("dear", "", "it takes 6.0 s or more, of 2")
    assert (timed["bucket"], timed["runs"], timed["untimed"]) == ("cheap", "quick", "")
    # one that only the rest of the budget does not suffice for is left to the next start
    first, second = (cell(clock.takes(0.2, double), quick=clock.takes(0.1, double)) for _ in range(2))
    assert len(time_all([first, second], clock=clock)) == 1


def test_it_is_timed_against_plain_torch_where_the_reference_is_something_else(clock):
    """The reference is what runs where no candidate is faster, so it is timed too; plain torch never runs."""
    for plain, reference, quick, runs in ((2e-3, 9e-3, 1e-3, "quick"), (1e-4, 2e-3, 3e-3, "reference")):
        made = {"against": clock.takes(plain, double), "quick": clock.takes(quick, double)}
        (row,) = time_all([cell(clock.takes(reference, double), **made)], clock=clock)
        assert row["runs"] == runs and row["us"]["torch"] == pytest.approx(plain * 1e6)
        assert row["us"][runs] == pytest.approx(min(reference, quick) * 1e6)


def test_what_runs_only_by_name_is_not_timed(clock):
    named = clock.takes(1e-6, double)
    assert time_all([cell(clock.takes(1e-3, double), named_on=("cpu",), named=named)], clock=clock) == []
    assert not named.called


def test_samples_are_taken_in_quiet_and_compiling_is_not(clock):
    inside = []

    @contextlib.contextmanager
    def quiet():
        inside.append(True)
        yield
        inside.pop()

    calls = []

    def watched(x):
        calls.append(bool(inside))
        return 2 * x

    time_all([cell(clock.takes(1e-3, double), quick=clock.takes(5e-4, watched))], clock=clock, quiet=quiet)
    assert calls[0] is False and all(calls[1:]) and len(calls) > 2


def test_an_op_that_writes_to_its_arguments_is_compared_by_what_it_wrote(clock):
    """One that writes nothing is not right because the reference has written before it."""

    def writes(x, out):
        out.copy_(2 * x)

    case = Case("any", lambda d, t, g: (torch.randn(8, generator=g), torch.zeros(8)))
    idle = Candidate(lambda: lambda x, out: None, lambda *_: "")
    op = Op("double", writes, {"idle": idle}, (case,), {F32: 0.0}, differentiable=False)
    (row,) = time_all([Cell(op, case, F32)], clock=clock)
    assert row["runs"] == "reference" and row["wrong"]["idle"]


def test_real_ops_are_timed_within_the_budget():
    """Two small ones, on this machine: whatever is faster, none is wrong."""
    from unfreeze.kernels.choice import ops

    swiglu, expand = ops.import_op("swiglu"), ops.import_op("expand")
    rows = time_all([Cell(op, op.cases[0], F32) for op in (swiglu, expand)], seconds=2.0)
    assert [row["op"] for row in rows] == ["swiglu", "expand"] and not any(row["wrong"] for row in rows)
    assert all(row["us"][row["runs"]] <= row["us"]["reference"] for row in rows)
    assert timed.BUDGET == 2.0
