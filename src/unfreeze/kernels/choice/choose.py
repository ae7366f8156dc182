"""Which implementation of an op runs. Measured records decide: verified faster, or not used.

A candidate runs if a record for this device, dtype and shape bucket shows both:
- its error, forward and backward, is within the op's tolerance;
- its median time is at least 5 % below the reference's, and by more than the spread of both.
Without a record the reference runs, and the log says so once. But on a GPU, a candidate that by count moves
fewer bytes is predicted to be faster, and runs if its results pass a check on that GPU (predicted.py).
A CPU class that was never measured uses the records of the nearest measured class; that is also logged once.
record.py says where the records lie.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from unfreeze.core.errors import ConfigError, nearest
from unfreeze.kernels.choice.op import Implementation, Op
from unfreeze.kernels.choice.record import Row, device_key, is_own, speaking_for

__all__ = [
    "Choice",
    "Inputs",
    "by_record",
    "choices",
    "choose",
    "choose_anew",
    "device_key",
    "implementation_of",
    "proves",
]

log = logging.getLogger(__name__)
REQUIRED_GAIN = 0.05

Origin = Literal[
    "measured here",
    "measured on its class",
    "measured on a near class",
    "predicted, not measured",
    "not measured",
    "by design",
    "as asked",
]
"""What decided: the user's own record, a committed one of this device class, one of the nearest CPU class,
counted bytes, nothing (the reference runs), a promise beyond speed or the only one that can run, a name."""


class Choice(NamedTuple):
    """The name of the implementation that runs, and why in words."""

    runs: str
    why: str
    origin: Origin


class Inputs(NamedTuple):
    """What a choice is made for. impl: "auto", or the name that was asked for."""

    op: str
    device: torch.device
    dtype: torch.dtype
    bucket: str
    impl: str


_WRONG: dict[tuple[str, str, torch.device, torch.dtype], str] = {}
_CHOSEN: dict[tuple[str, torch.device, torch.dtype, str, str], Implementation] = {}
_CHOICES: dict[Inputs, Choice] = {}


def choose(
    op: Op, device: torch.device, dtype: torch.dtype, bucket: str, impl: str = "auto"
) -> Implementation:
    """The implementation of `op` for inputs of that kind. After the first call it is a dictionary lookup.

    impl: "auto" (by record), "reference", or a candidate's name.
    Raises ConfigError for an unknown name, or a candidate that cannot run there.
    """
    return _CHOSEN.get((op.name, device, dtype, bucket, impl)) or _choose(op, device, dtype, bucket, impl)


def _choose(op: Op, device: torch.device, dtype: torch.dtype, bucket: str, impl: str) -> Implementation:
    asked = Choice(impl, "as asked", "as asked")
    choice = asked if impl != "auto" else by_record(op, device, dtype, bucket)
    implementation = implementation_of(op, choice.runs, device, dtype)
    precision = str(dtype).removeprefix("torch.")
    log.info("%s on %s in %s, %s: %s (%s)", op.name, device, precision, bucket, choice.runs, choice.why)
    _CHOSEN[op.name, device, dtype, bucket, impl] = implementation
    _CHOICES[Inputs(op.name, device, dtype, bucket, impl)] = choice
    return implementation


def choices() -> dict[Inputs, Choice]:
    """What was chosen since choose_anew, in that order."""
    return dict(_CHOICES)


def choose_anew() -> None:
    """Forget what was chosen, so that `choices` has what is used from here on."""
    _CHOSEN.clear()
    _CHOICES.clear()


def implementation_of(op: Op, name: str, device: torch.device, dtype: torch.dtype) -> Implementation:
    """The implementation with that name.

    Raises ConfigError where there is none, or it cannot run on that device in that dtype.
    """
    if name == "reference":
        return op.reference
    if name not in op.candidates:
        names = ["auto", "reference", *op.candidates]
        raise ConfigError(
            f"{op.name} has no implementation {name!r}{nearest(name, names)}; it has {', '.join(names)}"
        )
    reason = op.candidates[name].refuses(device.type, dtype)
    if reason:
        raise ConfigError(f"{op.name} cannot run as {name!r} here: {reason}", next="choose impl = 'auto'")
    return _loaded(op.name, name, op.candidates[name].load)


@functools.cache
def _loaded(op: str, name: str, load: Callable[[], Implementation]) -> Implementation:
    return load()


def by_record(op: Op, device: torch.device, dtype: torch.dtype, bucket: str, *, check: bool = True) -> Choice:
    """The fastest candidate that a record proves, or the reference.

    check: whether a predicted candidate is checked on the device; without, it is taken to be right.
    """
    # an op's preferred candidate needs no record: it is chosen for memory, not for time
    refused = op.candidates[op.preferred].refuses(device.type, dtype) if op.preferred else ""
    if op.preferred and not refused:
        return Choice(op.preferred, op.because, "by design")

    # the candidates that can run here; on a device of `named_on` one runs only where the user names it
    running = [
        name
        for name, part in op.candidates.items()
        if device.type not in part.named_on and not part.refuses(device.type, dtype)
    ]
    if not running:
        why = f"{op.preferred} cannot run: {refused}" if refused else "no candidate runs here"
        return Choice("reference", why, "by design")
    if bucket not in {case.bucket for case in op.cases}:
        return Choice("reference", "inputs of this kind are not measured", "not measured")

    # the records of this device, or of the nearest measured CPU class
    key = device_key(device)
    source, rows = speaking_for(op, device, dtype, bucket)
    if not rows:
        for name in running:
            candidate = op.candidates[name]
            predicted = candidate.predicted(device.type, bucket)
            if predicted and not (check and _found_wrong(op, name, device, dtype)):
                _log_predicted(key)
                why = f"predicted, not measured here: {candidate.because}"
                return Choice(name, why, "predicted, not measured")
        _log_unmeasured(key)
        why = f"no record for {key}; unfreeze kernels measure --op {op.name} makes one"
        return Choice("reference", why, "not measured")
    if source != key:
        _log_borrowed(key, source)
        origin = "measured on a near class"
    else:
        origin = "measured here" if is_own(rows[0], key) else "measured on its class"

    # of the proven ones, that with the smallest ratio of its time to the reference's
    proven = [row for row in rows if row["candidate"] in running and proves(row, op)]
    if not proven:
        return Choice("reference", f"{len(rows)} measured, none 5 % faster within the tolerance", origin)
    best = min(proven, key=lambda row: row["median_us"] / row["reference_median_us"])
    gain = f"{best['reference_median_us'] / best['median_us']:.2f} x the reference, {best['date']}"
    return Choice(best["candidate"], gain if source == key else f"{gain} on {source}", origin)


def proves(row: Row, op: Op) -> bool:
    """Whether a record allows its candidate: exact enough, and faster.

    Faster: by 5 % of the reference's median, and by more than both spreads (half the interquartile ranges).
    """
    if "refused" in row:
        return False
    limit = op.tolerance[getattr(torch, row["dtype"])]
    gain = row["reference_median_us"] - row["median_us"]
    return (
        row["error_forward"] <= limit
        and row["error_backward"] <= limit
        and gain >= REQUIRED_GAIN * row["reference_median_us"]
        and gain > (row["spread_us"] + row["reference_spread_us"]) / 2
    )


def _found_wrong(op: Op, name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why a predicted candidate may not run, or "". Asked once per device and dtype; failures are logged."""
    key = (op.name, name, device, dtype)
    if key not in _WRONG:
        # imported here: predicted.py imports measure.py, which imports this module
        from unfreeze.kernels.choice.predicted import wrong

        _WRONG[key] = wrong(op, name, device, dtype)
        if _WRONG[key]:
            log.warning(
                "%s: %s fails its check on %s in %s and does not run, the reference does: %s",
                *key,
                _WRONG[key],
            )
    return _WRONG[key]


@functools.cache
def _log_predicted(key: str) -> None:
    log.info(
        "kernels: on %s some ops run as counted bytes predict, not measured; unfreeze kernels measure --to"
        " user measures them, about 5 minutes",
        key,
    )


@functools.cache
def _log_unmeasured(key: str) -> None:
    log.info(
        "kernels: %s has no records for some ops, which run as their references; unfreeze kernels measure"
        " makes them",
        key,
    )


@functools.cache
def _log_borrowed(key: str, source: str) -> None:
    log.info(
        "kernels: %s has no records of its own, so those of %s decide; unfreeze kernels measure --to user"
        " makes its own",
        key,
        source,
    )
