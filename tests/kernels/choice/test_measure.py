"""Measuring: what is compared, what is refused with which reason, that samples are taken in turn, and what a
row holds."""

import contextlib
import dataclasses
import json
import math

import pytest
import torch

from unfreeze.kernels.choice import choose, measure
from unfreeze.kernels.choice.op import Candidate, Case, Op
from unfreeze.kernels.choice.record import device_key
from unfreeze.kernels.expert_mlp import packed_op
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

CPU, FLOAT = torch.device("cpu"), torch.float32


def runs(device, dtype):
    return ""


def inputs(device, dtype, generator):
    return torch.randn(32, generator=generator).to(device, dtype).requires_grad_(), 3


def op(reference=lambda x, n: x * n, **candidates):
    made = {name: Candidate(lambda f=function: f, runs) for name, function in candidates.items()}
    return Op(
        f"times {id(candidates)}",
        reference,
        made,
        (Case("any", inputs, (FLOAT,)),),
        {FLOAT: 1e-6, torch.bfloat16: 1e-2},
    )


def by_name(rows):
    return {row["candidate"]: row for row in rows}


def raises(x, n):
    raise RuntimeError("out of\n  luck")


def test_a_row_holds_errors_times_and_where_they_are_from():
    times = op(sum=lambda x, n: x + x + x)
    (row,) = measure.measure(times, times.cases[0], CPU, FLOAT, seconds=0.01)
    assert set(row) == {
        "op",
        "device",
        "dtype",
        "bucket",
        "candidate",
        "error_forward",
        "error_backward",
        "median_us",
        "reference_median_us",
        "spread_us",
        "reference_spread_us",
        "repeats",
        "threads",
        "torch",
        "date",
    }
    assert (row["device"], row["dtype"], row["bucket"], row["candidate"]) == (
        device_key(CPU),
        "float32",
        "any",
        "sum",
    )
    assert (
        0 < row["error_forward"] < 1e-6
        and row["repeats"] >= measure.FEWEST
        and row["threads"] == torch.get_num_threads()
    )
    assert row["median_us"] > 0 and row["spread_us"] >= 0 and json.dumps(row, allow_nan=False)
    choose.proves(row, times)  # reads every field it needs


def test_what_fails_is_refused_with_its_reason_and_not_timed():
    def wrong_gradient(x, n):
        return x.detach() * n + (x - x.detach())

    times = op(
        good=lambda x, n: x * n,
        wrong=lambda x, n: x * n * 1.001,
        backward=wrong_gradient,
        raising=raises,
        short=lambda x, n: (x * n)[:-1],
        wide=lambda x, n: (x * n).double(),
        nan=lambda x, n: x * float("nan"),
        two=lambda x, n: (x * n, x * n),
    )
    rows = by_name(measure.measure(times, times.cases[0], CPU, FLOAT, seconds=0.01))
    assert {name: row.get("refused", "") for name, row in rows.items()} == {
        "good": "",
        "wrong": "error 1.0e-03, tolerance 1.0e-06",
        "backward": "error 6.7e-01, tolerance 1.0e-06",
        "raising": "RuntimeError: out of luck",
        "short": "Wrong: shape [31], wanted [32]",
        "wide": "Wrong: outputs in ['torch.float64'], the reference's are in ['torch.float32']",
        "nan": "error inf, tolerance 1.0e-06",
        "two": (
            "Wrong: outputs in ['torch.float32', 'torch.float32'], the reference's are in ['torch.float32']"
        ),
    }
    assert all(("median_us" in row) == ("refused" not in row) for row in rows.values())
    assert not any(choose.proves(row, times) for row in rows.values() if "refused" in row)


def test_a_candidate_that_cannot_run_here_leaves_no_row():
    times = op(good=lambda x, n: x * n)
    absent = Op(
        times.name,
        times.reference,
        {"gpu": Candidate(raises, lambda *_: "no GPU")},
        times.cases,
        times.tolerance,
    )
    assert measure.measure(absent, absent.cases[0], CPU, FLOAT, 0.01) == []


def test_a_reference_that_fails_is_the_callers_to_judge():
    times = op(reference=raises, good=lambda x, n: x * n)
    with pytest.raises(RuntimeError, match="out of"):
        measure.measure(times, times.cases[0], CPU, FLOAT, 0.01)


def test_inputs_are_the_same_numbers_in_memory_of_their_own():
    """An op may write into its arguments: the next implementation must not find that."""
    case = op().cases[0]
    one, other = (measure.arguments(case, CPU, FLOAT)[0] for _ in range(2))
    assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()

    def spoils(x, n):
        y = x * n
        x.data.zero_()
        return y

    spoiled = op(reference=spoils, second=lambda x, n: x * n)
    assert "refused" not in by_name(measure.measure(spoiled, spoiled.cases[0], CPU, FLOAT, 0.001))["second"]


def test_conversion_reaches_into_containers_and_leaves_codes_alone():
    @dataclasses.dataclass(frozen=True)
    class Pair:
        A: torch.Tensor
        note: str = "x"

    packed = Packed(Int4(32), Int4(32).quantize(torch.randn(4, 64)))
    leaf, ids = torch.randn(3).requires_grad_(), torch.arange(3)
    value = (leaf, [ids, {"a": torch.zeros(2)}], Pair(torch.ones(2).requires_grad_()), packed, None, 2.5)
    got = measure.converted(value, torch.float64)
    assert got[0].dtype == torch.float64 and got[0].requires_grad and got[0].is_leaf and got[1][0] is ids
    assert got[1][1]["a"].dtype == torch.float64 and not got[1][1]["a"].requires_grad
    assert (
        got[2].A.dtype == torch.float64 and got[2].note == "x" and got[3] is packed and got[4:] == (None, 2.5)
    )
    assert [tuple(x.shape) for x in measure.tensors(got)] == [(3,), (3,), (2,), (2,)]


def test_an_op_that_returns_nothing_is_judged_by_its_arguments():
    def inputs(device, dtype, generator):
        return (torch.randn(8, generator=generator).to(device, dtype),)

    made = {
        "twice": Candidate(lambda: lambda x: (x.mul_(2), None)[1], runs),
        "thrice": Candidate(lambda: lambda x: (x.mul_(3), None)[1], runs),
    }
    case = Case("any", inputs, (FLOAT,))
    op = Op(
        "double in place", lambda x: (x.add_(x), None)[1], made, (case,), {FLOAT: 1e-6}, differentiable=False
    )
    rows = by_name(measure.measure(op, case, CPU, FLOAT, 0.001))
    assert "refused" not in rows["twice"] and rows["thrice"]["refused"] == "error 5.0e-01, tolerance 1.0e-06"


@pytest.mark.parametrize(
    "got, want, expected",
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([3.0, 4.4], [3.0, 4.0], 0.08),
        ([0.0], [0.0], 0.0),
        ([1e-30], [0.0], math.inf),
        ([math.nan], [1.0], math.inf),
        ([1, 2], [1, 2], 0.0),
        ([1, 3], [1, 2], math.inf),
    ],
)
def test_relative_error(got, want, expected):
    assert measure.relative_error(torch.tensor(got), torch.tensor(want)) == pytest.approx(expected, rel=1e-5)


def test_samples_are_taken_in_turn_after_a_warm_up():
    calls = []
    times = measure.in_turn({name: lambda name=name: calls.append(name) for name in "ab"}, CPU, seconds=0.0)
    assert {name: len(samples) for name, samples in times.items()} == {
        "a": measure.FEWEST,
        "b": measure.FEWEST,
    }
    runs = [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]
    assert runs[-2 * measure.FEWEST :] == ["a", "b"] * measure.FEWEST and runs[:2] == ["a", "b"]


def test_sampling_ends_where_more_samples_change_nothing_and_not_before():
    now = 0.0

    def takes(*microseconds):
        turns = iter(range(10**6))

        def call():
            nonlocal now
            now += microseconds[next(turns) % len(microseconds)] * 1e-6

        return call

    def samples(**calls) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure.time, "process_time", lambda: now)
            patch.setattr(measure.time, "perf_counter", lambda: now)
            return len(measure.in_turn(calls, CPU, seconds=10.0)["first"])

    assert samples(first=takes(9000), twice=takes(4500)) == measure.FEWEST  # 2 x, without spread
    assert samples(first=takes(9000), slow=takes(18000)) == measure.FEWEST  # slower: as clear
    # 1.13 x would be proved, but by less than CLEAR times 5 %
    assert samples(first=takes(9000), near=takes(8000)) == measure.MOST
    # within CLEAR times the spreads
    assert samples(first=takes(9000, 7000, 11000, 5000), noisy=takes(4500, 2500, 6500)) == measure.MOST
    # one of two is not clear
    assert samples(first=takes(9000), twice=takes(4500), near=takes(8900)) == measure.MOST


def test_median_and_interquartile_range():
    assert measure.median_and_spread([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 2.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_events_time_the_call():
    x = torch.randn(4096, 4096, device="cuda")
    times = measure.in_turn({"mm": lambda: x @ x, "add": lambda: x + 1}, torch.device("cuda"), seconds=0.1)
    assert min(times["mm"]) > min(times["add"]) > 0


def test_a_gpu_waits_before_a_sample_until_the_host_has_queued_it(monkeypatch):
    """Else a call of many launches is timed at the host's pace."""
    order = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            order.append("record")

        def synchronize(self):
            order.append("synchronize")

        def elapsed_time(self, end):
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    clock = measure._CudaClock(torch.device("meta"))
    assert clock(lambda: order.append("call"), 1) == 1e3
    assert order == ["sleep", "record", "call", "record", "synchronize"]


def test_packed_experts_are_compared_with_float64():
    """Their reference is a backend of ours, which expands codes to float32 at most; `against` is plain torch."""
    packed = packed_op()
    truth = measure.Truth(packed, packed.cases[0], CPU, FLOAT)
    assert all(x.dtype == torch.float64 for x in truth.exact[0])
    assert truth.errors(packed.candidates["panels"].load()).forward <= packed.tolerance[FLOAT]
    with pytest.raises(ValueError, match="codes expand to"):
        measure.Truth(dataclasses.replace(packed, against=None), packed.cases[0], CPU, FLOAT)
