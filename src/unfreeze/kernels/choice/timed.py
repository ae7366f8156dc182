"""At a machine's first start the CPU candidates are timed against plain torch, for at most 2 seconds.

Compiling is not counted, and numba keeps its compiled code. A cell (an op, a dtype and a bucket of shapes) is
timed once; times.py keeps the result. A timing overrides any record: a record was measured on a machine of
the same class, a timing on this one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from typing import NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.choice import measure
from unfreeze.kernels.choice.choose import REQUIRED_GAIN, running
from unfreeze.kernels.choice.op import Case, Implementation, Op
from unfreeze.kernels.choice.times import Key, Row, key_of

BUDGET = 2.0  # seconds of timing at one start
FEWEST, MOST = 3, 9  # samples of each implementation
ENOUGH = 0.05  # seconds of samples of one implementation, after which no more are taken
TORCH = "torch"  # in a row: plain torch, if the op's reference is something else
FAR = 2.0  # times the fastest; slower ones are not sampled again
CPU = torch.device("cpu")


class Cell(NamedTuple):
    """The unit of a decision."""

    op: Op
    case: Case
    dtype: torch.dtype

    @property
    def key(self) -> Key:
        return key_of(self.op, self.dtype, self.case.bucket)


def time_all(
    cells: Iterable[Cell],
    seconds: float = BUDGET,
    clock: Callable[[], float] | None = None,
    quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Row]:
    """A row for each cell, in order, until `seconds` are spent.

    A cell that would take more than the remaining time has no row. One that would take more than the whole
    budget has a row that says so ("untimed"), and is not tried again. quiet: a context in which none of our
    other processes computes. clock: by default CPU time with one thread, which other processes disturb less,
    else wall time.
    """
    clock = clock or (time.process_time if torch.get_num_threads() == 1 else time.perf_counter)
    rows: list[Row] = []
    budget = seconds
    for cell in cells:
        row, spent = _timed(cell, seconds, budget, clock, quiet)
        seconds -= spent
        rows += [row] if row else []
    measure.forget()
    return rows


def _timed(
    cell: Cell,
    seconds: float,
    budget: float,
    clock: Callable[[], float],
    quiet: Callable[[], AbstractContextManager[object]],
) -> tuple[Row | None, float]:
    """(the cell's row, the seconds of timing); no row if `seconds`, the rest of `budget`, do not suffice."""
    op, case, dtype = cell
    plain = op.against or op.reference
    beside = (
        {TORCH: op.against} if op.against else {}
    )  # timed, but never chosen: it does not keep the promise about memory
    args = measure.arguments(case, CPU, dtype)

    def once(implementation: Implementation) -> float:
        begun = clock()
        measure.visit(op, implementation, args)
        return clock() - begun

    # the first call of each allocates buffers and compiles loops; its results must equal plain torch's
    want = _results(op, plain, case, dtype)
    lap = once(plain)
    able = running(op, CPU, dtype, case.bucket)
    names = dict(zip(("op", "dtype", "bucket"), cell.key, strict=True))
    least = lap * FEWEST * (1 + len(able) + len(beside))
    if not able or least > seconds:
        why = f"it takes {least:.1f} s or more, of {budget:g}"
        dear = {**names, "runs": "", "us": {}, "wrong": {}, "untimed": why, "date": _today()}
        return dear if able and least > budget else None, lap
    good, wrong = {**beside, "reference": op.reference}, dict[str, str]()
    for name in able if not beside else ["reference", *able]:
        try:
            implementation = good.get(name) or op.candidates[name].load()
            wrong[name] = _differs(_results(op, implementation, case, dtype), want, 2 * op.tolerance[dtype])
        # any failure disqualifies it
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        if not wrong[name]:
            good[name] = implementation

    # sample in turn, so that anything that slows the machine for a while slows all of them; skip the clearly
    # slower ones
    times: dict[str, list[float]] = {name: [] for name in good}
    spent, sampled = lap, list(good)
    with quiet():
        for count in range(MOST):
            for name in sampled:
                times[name].append(once(good[name]))
            total = sum(map(sum, times.values()))
            if count + 1 >= FEWEST and (total >= ENOUGH * len(good) or spent + total >= seconds):
                break
            least = min(map(min, times.values()))
            sampled = [name for name in sampled if name == "reference" or min(times[name]) <= FAR * least]
    us = {name: round(statistics.median(samples) * 1e6, 2) for name, samples in times.items()}
    fastest = min(us.keys() - beside, key=lambda name: us[name])
    runs = fastest if us[fastest] <= (1 - REQUIRED_GAIN) * us["reference"] else "reference"
    faults = {name: fault for name, fault in wrong.items() if fault}
    row = {**names, "runs": runs, "us": us, "wrong": faults, "untimed": "", "date": _today()}
    return row, spent + sum(map(sum, times.values()))


def _today() -> str:
    return date.today().isoformat()


def _results(
    op: Op, implementation: Implementation, case: Case, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs, gradients), of arguments that nothing else writes to."""
    return measure.visit(op, implementation, measure.arguments(case, CPU, dtype))


def _differs(
    got: tuple[list[Tensor], list[Tensor]], want: tuple[list[Tensor], list[Tensor]], limit: float
) -> str:
    """The difference if results differ from plain torch's by more than `limit` of the norm; else ""."""
    for ours, theirs in zip(got, want, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            if x.shape != y.shape or x.dtype != y.dtype:
                return f"{list(x.shape)} {x.dtype} instead of {list(y.shape)} {y.dtype}"
            x, y = x.detach(), y.detach()
            if torch.equal(x, y):
                continue
            error = float((x.float() - y.float()).norm() / y.float().norm())
            if not error <= limit:
                return f"differs from plain torch by {error:.1e} of the norm, allowed {limit:.1e}"
    return ""
