"""Chooses the implementation of an op: the first of LOOKS that has an answer decides.

the run's      read from the run folder, so that a resumed run and all processes use the same (table.py)
timed here     CPU: timed against plain torch at this machine's first start (timed.py). GPU: compared with
               float64 and timed at the first start on this card, or by `unfreeze doctor --gpu` (checked.py)
by design      a candidate that keeps a promise beyond speed, or the only one that can run
measured       a record of this device class shows that it is exact within the op's tolerance, and faster
               than the reference by at least 5 % and by more than the spread of both (record.py)
predicted      it moves fewer bytes by count; on a GPU it is checked first (predicted.py)
not measured   the reference runs, and the log says so once
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

import torch

from unfreeze.core.errors import ConfigError, nearest
from unfreeze.kernels.choice.configs import with_best
from unfreeze.kernels.choice.op import Implementation, Op
from unfreeze.kernels.choice.record import Row, device_key, is_own, record_rows
from unfreeze.kernels.choice.times import Key, key_of, known, wrong

__all__ = [
    "Choice",
    "Inputs",
    "by_record",
    "choices",
    "choose",
    "choose_anew",
    "choose_if_right",
    "device_key",
    "fix",
    "implementation_of",
    "is_right",
    "proves",
    "running",
]

log = logging.getLogger(__name__)
REQUIRED_GAIN = 0.05
CHECKED = ("cuda",)  # here predicted candidates are checked against the reference first; on a CPU tests do it

Origin = Literal[
    "timed here",
    "measured here",
    "measured on its class",
    "predicted, not measured",
    "not measured",
    "by design",
    "as asked",
]
"""What decided: a timing on this machine, the user's own record, a committed record of this device class,
counted bytes, nothing (the reference runs), a promise beyond speed or the only one that can run, a name."""
SAID: dict[Origin, str] = {
    "predicted, not measured": "on {} some kernels are chosen by predicted memory traffic, not measured; to"
    " measure them (about 5 minutes): unfreeze dev kernels measure --to user",
    "not measured": "{} has no records for some ops, which run as plain torch; to measure them:"
    " unfreeze dev kernels measure",
}
"""Origin -> line that is logged once per device class; other origins log nothing."""


class Choice(NamedTuple):
    """The name of the implementation that runs, and the reason in words."""

    runs: str
    why: str
    origin: Origin


class Inputs(NamedTuple):
    """The inputs that a choice is for. impl: "auto", or the requested name."""

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

    impl: "auto" (by record), "reference", or a candidate's name. Raises ConfigError for an unknown name, or
    for a candidate that cannot run there.
    """
    return _CHOSEN.get((op.name, device, dtype, bucket, impl)) or _choose(op, device, dtype, bucket, impl)


def _choose(op: Op, device: torch.device, dtype: torch.dtype, bucket: str, impl: str) -> Implementation:
    named = Choice(impl, "as asked", "as asked")
    choice = named if impl != "auto" else by_record(op, device, dtype, bucket)
    return _keep(choice, op, device, dtype, bucket, impl)


def choose_if_right(
    op: Op, name: str, device: torch.device, dtype: torch.dtype, bucket: str, why: str
) -> Implementation:
    """The candidate `name` if it can run there and no check found it wrong, else the reference.

    For a caller that the chosen one does not serve; `why` says so. On a GPU it is checked first. Remembered
    as by `choose`.
    """
    impl = f"{name} if right"
    if (earlier := _CHOSEN.get((op.name, device, dtype, bucket, impl))) is not None:
        return earlier
    runs = name if is_right(op, name, device, dtype, bucket) else "reference"
    return _keep(Choice(runs, why, "by design"), op, device, dtype, bucket, impl)


def is_right(op: Op, name: str, device: torch.device, dtype: torch.dtype, bucket: str) -> bool:
    """True if that candidate can run there and passed its check on this card, or passes it now."""
    if name not in running(op, device, dtype, bucket):
        return False
    if (row := known(device).get(key_of(op, dtype, bucket))) is not None and name in row["us"] | row["wrong"]:
        return name not in row["wrong"]
    return not _fault(Choice(name, "", "predicted, not measured"), op, device, dtype)


def _keep(
    choice: Choice, op: Op, device: torch.device, dtype: torch.dtype, bucket: str, impl: str
) -> Implementation:
    implementation = with_best(
        implementation_of(op, choice.runs, device, dtype), op, choice.runs, device, dtype, bucket
    )
    precision = str(dtype).removeprefix("torch.")
    log.info("%s on %s in %s, %s: %s (%s)", op.name, device, precision, bucket, choice.runs, choice.why)
    _CHOSEN[op.name, device, dtype, bucket, impl] = implementation
    _CHOICES[Inputs(op.name, device, dtype, bucket, impl)] = choice
    return implementation


def choices() -> dict[Inputs, Choice]:
    """The choices made since choose_anew, in order."""
    return dict(_CHOICES)


def choose_anew() -> None:
    """Forget all choices, so that `choices` lists only those made from here on."""
    _CHOSEN.clear()
    _CHOICES.clear()


def implementation_of(op: Op, name: str, device: torch.device, dtype: torch.dtype) -> Implementation:
    """The implementation with that name.

    Raises ConfigError if there is none, or if it cannot run on that device in that dtype.
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
    """The choice if no name is requested.

    check: on a GPU check a candidate first that was not checked at this card's first start; if False, take it
    to be right. A candidate that fails is banned: the next one runs, and `why` names the fault.
    """
    able, faults = running(op, device, dtype, bucket), list[str]()
    banned = wrong(device, key_of(op, dtype, bucket))
    able = [name for name in able if name not in banned]

    def bans(words: str) -> list[str]:
        """The candidates that a check found wrong here, if `words` does not say so."""
        return [f"{name} is wrong: {fault}" for name, fault in banned.items() if fault not in words]

    while choice := next(filter(None, (look(op, device, dtype, bucket, able) for look in LOOKS)), None):
        fault = _fault(choice, op, device, dtype) if check else ""
        if not fault:
            if choice.origin == "predicted, not measured":
                _log_once(device_key(device), choice.origin)
            refusals = _refusals(op, device, dtype) if op.instead and choice.runs == op.instead else []
            return choice._replace(why="; ".join([choice.why, *refusals, *bans(choice.why), *faults]))
        able.remove(choice.runs)
        faults.append(f"{choice.runs} failed its check: {fault}")
    why = f"no record for {device_key(device)}; unfreeze dev kernels measure --op {op.name} makes one"
    _log_once(device_key(device), "not measured")
    return Choice("reference", "; ".join([*bans(""), *faults]) or why, "not measured")


def running(op: Op, device: torch.device, dtype: torch.dtype, bucket: str) -> list[str]:
    """The candidates that can compute that bucket there.

    On a device in `named_on`, a candidate runs only by name.
    """
    return [
        name
        for name, part in op.candidates.items()
        if device.type not in part.named_on and part.can(device.type, dtype, bucket)
    ]


def _refusals(op: Op, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The reasons why the preferred candidate, and the one that runs instead of it, cannot run there."""
    reasons = {
        name: op.candidates[name].refuses(device.type, dtype)
        for name in filter(None, (op.preferred, op.instead))
    }
    return [f"{name} cannot run: {reason}" for name, reason in reasons.items() if reason]


def _by_design(
    op: Op, device: torch.device, dtype: torch.dtype, bucket: str, able: Collection[str]
) -> Choice | None:
    for name in (op.preferred, op.instead):
        if name in able:
            return Choice(name, op.because, "by design")
    if not able:
        refused = "; ".join(_refusals(op, device, dtype))
        return Choice("reference", refused or "no candidate runs here", "by design")
    if bucket not in {case.bucket for case in op.cases}:
        return Choice("reference", "inputs of this kind are not measured", "not measured")
    return None


def _of_the_run(
    op: Op, device: torch.device, dtype: torch.dtype, bucket: str, able: Collection[str]
) -> Choice | None:
    choice = _TABLE.get((device.type, *key_of(op, dtype, bucket)))
    here = choice is not None and choice.runs in ("reference", *able)
    return choice if here else None


def _timed(
    op: Op, device: torch.device, dtype: torch.dtype, bucket: str, able: Collection[str]
) -> Choice | None:
    row = known(device).get(key_of(op, dtype, bucket))
    if row is None or row["runs"] not in ("reference", *able):
        return None
    plain, words = row["us"].get("torch") or row["us"]["reference"], []
    for name, us in row["us"].items():
        if us != plain:
            words.append(f"{name} {plain / us:.2f} x plain torch")
    words += [f"{name} is wrong: {fault}" for name, fault in row["wrong"].items()]
    return Choice(row["runs"], f"{', '.join(words)}, {row['date']}", "timed here")


def _recorded(
    op: Op, device: torch.device, dtype: torch.dtype, bucket: str, able: Collection[str]
) -> Choice | None:
    rows = record_rows(op, device, dtype, bucket)
    if not rows:
        return None
    origin = "measured here" if is_own(rows[0], device_key(device)) else "measured on its class"
    # of the proven ones, take the smallest ratio of its time to the reference's
    proven = [row for row in rows if row["candidate"] in able and proves(row, op)]
    if not proven:
        return Choice("reference", f"{len(rows)} measured, none 5 % faster within the tolerance", origin)
    best = min(proven, key=lambda row: row["median_us"] / row["reference_median_us"])
    gain = f"{best['reference_median_us'] / best['median_us']:.2f} x the reference, {best['date']}"
    return Choice(best["candidate"], gain, origin)


def _predicted(
    op: Op, device: torch.device, dtype: torch.dtype, bucket: str, able: Collection[str]
) -> Choice | None:
    for name in able:
        candidate = op.candidates[name]
        if candidate.predicted(device.type, bucket) and candidate.suits(device):
            why = f"predicted, not measured here: {candidate.because}"
            return Choice(name, why, "predicted, not measured")
    return None


LOOKS = (_of_the_run, _timed, _by_design, _recorded, _predicted)
_TABLE: dict[tuple[str, str, str, str], Choice] = {}


def fix(table: Mapping[Key, Choice], kind: str = "cpu") -> None:
    """Fix these choices from here on, by op, dtype and bucket; others are looked up. kind: of device."""
    _TABLE.clear()
    _TABLE.update({(kind, *key): choice for key, choice in table.items()})
    choose_anew()


def proves(row: Row, op: Op) -> bool:
    """True if a record allows its candidate: exact enough, and faster.

    Faster means: by 5 % of the reference's median, and by more than both spreads (half the interquartile
    ranges).
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


UNCHECKED: tuple[Origin, ...] = ("predicted, not measured", "measured here", "measured on its class")
"""Origins that do not prove a candidate right on this card with this torch, Triton and driver."""


def _fault(choice: Choice, op: Op, device: torch.device, dtype: torch.dtype) -> str:
    """The reason why a chosen candidate fails its check there, "" if it passes.

    Checked once per device and dtype, and only on a GPU: on a CPU the tests do it.
    """
    if choice.origin not in UNCHECKED or choice.runs == "reference" or device.type not in CHECKED:
        return ""
    key = (op.name, choice.runs, device, dtype)
    if key not in _WRONG:
        # imported here: predicted.py imports measure.py, which imports this module
        from unfreeze.kernels.choice.predicted import wrong

        _WRONG[key] = wrong(op, choice.runs, device, dtype)
        if _WRONG[key]:
            log.warning("%s: %s fails its check on %s in %s and does not run: %s", *key, _WRONG[key])
    return _WRONG[key]


@functools.cache
def _log_once(key: str, origin: Origin) -> None:
    if origin in SAID:
        log.info("kernels: %s", SAID[origin].format(key))
