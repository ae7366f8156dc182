"""Checks every candidate of an op on this device: its error against float64, and its time.

A row for each cell (an op, a dtype and a bucket of shapes), in the form of times.py, which keeps it. A
candidate that raises, is not exact within the op's tolerance, or is slower, does not run there from then on.
It is checked at the shapes that it is timed at, and in each function that others call (`Op.uses`).
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date

import torch

from unfreeze.kernels.choice import measure
from unfreeze.kernels.choice.choose import REQUIRED_GAIN, implementation_of, running
from unfreeze.kernels.choice.op import Case, Op
from unfreeze.kernels.choice.timed import Cell
from unfreeze.kernels.choice.times import Row
from unfreeze.kernels.loops.scratch import release_scratch

NO_MEMORY = "OutOfMemoryError"
BROKEN = "AcceleratorError"  # torch's, after an illegal access
SAMPLING = 0.1  # seconds of timing of one cell; at least measure.FEWEST samples of each


def check_all(
    cells: Iterable[Cell],
    device: torch.device,
    seconds: float,
    sampling: float = SAMPLING,
    tune: Callable[[Cell], object] = lambda cell: None,
) -> Iterator[Row]:
    """Yield a row for each cell, in order, until `seconds` have passed (compiling included).

    A cell that the reference itself cannot compute, or for which there is no memory, has a row that says so
    ("untimed"). After a kernel that breaks the device's context, nothing else can be checked: it ends.
    sampling: seconds of timing of one cell. tune: called before each cell, to measure launch parameters.
    """
    begun = time.perf_counter()
    faults: dict[tuple[str, torch.dtype], dict[str, str]] = {}
    for cell in cells:
        if time.perf_counter() - begun > seconds:
            break
        op, case, dtype = cell
        with measure.drawn_once():
            tune(cell)
            if (op.name, dtype) not in faults:
                faults[op.name, dtype] = of_uses(op, device, dtype)
            row = check(op, case, device, dtype, faults[op.name, dtype], sampling)
        yield row
        if is_broken(row):
            break
        release_scratch()  # the plan counts what is free
        if device.type == "cuda":
            torch.cuda.empty_cache()
    measure.forget()


def check(
    op: Op,
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    faults: dict[str, str],
    sampling: float = SAMPLING,
) -> Row:
    """The row of one cell. faults: candidate -> the reason why it is wrong in a function of `Op.uses`."""
    names = {"op": op.name, "dtype": str(dtype).removeprefix("torch."), "bucket": case.bucket}
    row: Row = {**names, "runs": "", "us": {}, "wrong": {}, "error": {}, "untimed": "", "date": _today()}
    gc.collect()
    able = running(op, device, dtype, case.bucket)
    try:
        good, errors, wrong = measure.candidates_of(op, case, device, dtype)
        if full := next((reason for reason in wrong.values() if reason.startswith(NO_MEMORY)), ""):
            return row | {"untimed": full}  # of a card that others fill: no proof that a kernel is wrong
        wrong = {name: reason for name, reason in (faults | wrong).items() if name in able}
        if is_broken(row | {"wrong": wrong}):
            return row | {"wrong": wrong, "untimed": "a kernel broke the device's context"}
        good = {name: call for name, call in good.items() if name in able and name not in wrong}
        calls = {
            name: measure.call(op, f, case, device, dtype)
            for name, f in {"reference": op.reference, **good}.items()
        }
        samples = measure.in_turn(calls, device, sampling)
    # the reference fails: out of memory, or an operation that this device lacks
    except Exception as error:
        return row | {"untimed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    us = {name: measure.median_and_spread(times)[0] for name, times in samples.items()}
    return row | {
        "runs": _fastest(op, us),
        "us": us,
        "wrong": wrong,
        "error": {name: [finite(errors[name].forward), finite(errors[name].backward)] for name in errors},
    }


def is_broken(row: Row) -> bool:
    """True if a kernel of that row broke the device's context (an illegal access): every later call fails."""
    return any(BROKEN in reason for reason in (row.get("untimed", ""), *row["wrong"].values()))


def is_kept(row: Row) -> bool:
    """True if a row tells something of the kernels: not if memory was short, or the device broken before."""
    return bool(row["wrong"]) or not row.get("untimed", "").startswith((NO_MEMORY, BROKEN))


def finite(error: float) -> float | None:
    """None for what JSON cannot hold."""
    return error if math.isfinite(error) else None


def _fastest(op: Op, us: dict[str, float]) -> str:
    """The implementation that runs: the preferred one if it is right, else the fastest.

    One that gains less than 5 % on the reference does not run.
    """
    if op.preferred in us:
        return op.preferred
    keeps = us.keys() - {"reference"} if op.preferred else us.keys()  # others keep its promise too
    name = min(keeps or us.keys(), key=lambda name: us[name])
    gains = op.preferred or us[name] <= (1 - REQUIRED_GAIN) * us["reference"]
    return name if gains else "reference"


def of_uses(op: Op, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Candidate -> the reason why a function that others call is wrong, of those that can run there.

    If the reference cannot compute a case, no candidate is blamed.
    """
    faults: dict[str, str] = {}
    for use in op.uses:
        if dtype not in use.dtypes:
            continue
        try:
            truth = measure.Truth(op, use, device, dtype)
        # out of memory, or an operation that this device lacks
        except Exception:
            continue
        for name in running(op, device, dtype, use.bucket):
            try:
                errors = truth.errors(implementation_of(op, name, device, dtype))
                worst, limit = max(errors.forward, errors.backward), op.tolerance[dtype]
                if worst > limit:
                    faults.setdefault(name, f"{use.name}: error {worst:.1e}, tolerance {limit:.1e}")
            # any failure disqualifies it
            except Exception as error:
                words = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                faults.setdefault(name, f"{use.name}: {words}")
    return faults


def cells_of(ops: Iterable[Op], device: torch.device) -> list[Cell]:
    """Every cell of these ops with a candidate that can run there."""
    return [
        Cell(op, case, dtype)
        for op in ops
        for case in op.cases
        for dtype in case.dtypes
        if running(op, device, dtype, case.bucket)
    ]


def _today() -> str:
    return date.today().isoformat()
