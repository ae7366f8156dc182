"""Launch parameters of a candidate: blocks, warps and stages, measured on the card and kept for it.

A kernel has parameters of its own, which it takes from shapes. `Candidate.configs` lists others per bucket.
`measure_configs` times them in turn with its own, and keeps the fastest beside the records of the device
class. choose() takes it (`with_best`). Without such a row a kernel runs with its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from unfreeze.kernels.choice import record
from unfreeze.kernels.choice.op import Case, Config, Implementation, Op
from unfreeze.kernels.choice.record import Row, readable, write

OWN: Config = {}
GAIN = 0.02  # a config that saves less than this share of the time is not worth a row


def configs_of(op: Op, name: str, bucket: str) -> tuple[Config, ...]:
    """The configs that a candidate can be measured with in that bucket; () if it has only its own."""
    candidate = op.candidates.get(name)
    return tuple(candidate.configs.get(bucket, ())) if candidate else ()


def best(op: Op, name: str, device: torch.device, dtype: torch.dtype, bucket: str) -> Config:
    """The config kept for this device class, the user's first; OWN if there is none, or it is not listed."""
    configs = configs_of(op, name, bucket)
    if not configs or device.type != "cuda":
        return OWN
    wanted = (op.name, _name(dtype), bucket, name)
    for folder in (record.user_folder(), record.COMMITTED):
        for row in readable(beside(folder / f"{record.device_key(device)}.json")):
            if record.identity(row) == wanted:
                return row["config"] if row["config"] in configs else OWN
    return OWN


def with_best(
    implementation: Implementation, op: Op, name: str, device: torch.device, dtype: torch.dtype, bucket: str
) -> Implementation:
    """The implementation of candidate `name` with its best config."""
    config = best(op, name, device, dtype, bucket)
    return configured(implementation, config) if config else implementation


def configured(implementation: Implementation, config: Config) -> Implementation:
    """The implementation with that config: a candidate with configs loads an object with this method."""
    return getattr(implementation, "configured")(config)  # noqa: B009


def measure_all(
    op: Op, case: Case, device: torch.device, dtype: torch.dtype, seconds: float, records: Path | None = None
) -> list[Row]:
    """`measure_configs` of every candidate that has configs and runs there."""
    from unfreeze.kernels.choice.choose import running  # which imports this module

    return [
        row
        for name in running(op, device, dtype, case.bucket)
        if (row := measure_configs(op, name, case, device, dtype, seconds, records)) is not None
    ]


def measure_configs(
    op: Op,
    name: str,
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    records: Path | None = None,
) -> Row | None:
    """Time the candidate with each of its configs in turn, and keep the fastest; None if it has only its own.

    records: the file of records to keep it beside; None: the user's own. Timing takes about `seconds`.
    A config that is wrong or fails (more shared memory than the card has) is left out, and the row names it.
    """
    # these import choose.py, which imports this module
    from unfreeze.kernels.choice import measure, predicted
    from unfreeze.kernels.choice.choose import implementation_of

    configs = configs_of(op, name, case.bucket)
    if not configs:
        return None
    own = implementation_of(op, name, device, dtype)
    good, failed = {"own": own}, dict[str, str]()
    truth = measure.Truth(op, case, device, dtype)  # on the device: a CPU takes seconds for a large case
    for number, config in enumerate(configs):
        implementation = configured(own, config)
        fault = predicted.fault_against(lambda: truth, lambda x=implementation: x, op.tolerance[dtype])
        if fault:
            failed[str(config)] = fault
        else:
            good[str(number)] = implementation
    args = measure.arguments(case, device, dtype)
    calls: dict[str, Callable[[], object]] = {
        label: functools.partial(measure.visit, op, function, args) for label, function in good.items()
    }
    times = measure.in_turn(calls, device, seconds)
    medians = {label: measure.median_and_spread(samples)[0] for label, samples in times.items()}
    fastest = min(medians, key=lambda label: medians[label])
    if medians[fastest] > (1 - GAIN) * medians["own"]:
        fastest = "own"
    row: Row = {
        "op": op.name,
        "device": record.device_key(device),
        "dtype": _name(dtype),
        "bucket": case.bucket,
        "candidate": name,
        "config": dict(OWN if fastest == "own" else configs[int(fastest)]),
        "median_us": medians[fastest],
        "own_median_us": medians["own"],
        "failed": failed,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    own_file = record.user_folder() / f"{record.device_key(device)}.json"
    write(beside(records or own_file), [row], {op.name: op})
    return row


def beside(records: Path) -> Path:
    """The file of configs that belongs to a file of records."""
    return records.with_name(f"{records.stem}-configs.json")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
