"""Runs of a study: their words, their order, and what is read from their folders.

A run of a command is its folder's events and last save; a script leaves result.json:

    {"value": 2.31, "rows": [2.2, …], "flops": 1e12, "active": 1e6, "curve": [[step, value], …],
     "more": {"steps to 90 %": 40}}

Only value is needed; null says that the run diverged.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from unfreeze.commands.reads import files_of
from unfreeze.commands.staged import digest
from unfreeze.config.lab import Arm, Lab
from unfreeze.core.errors import ConfigError, nearest
from unfreeze.report.events import read_events
from unfreeze.untrusted.json_object import read_object

TUNING_SEED = 1000
"""Seed of the runs that try learning rates: none of the seeds that arms are compared on."""
RESULT = "result.json"
LOWEST, TRAINED = "lowest_", "train_loss"
LAST = 0.1
"""Share of the steps, at the end, whose mean is train_loss."""


@dataclass(frozen=True)
class Run:
    """One run: an arm with a seed. rate: its learning rate, if the study tries some; tuning: it tries one."""

    arm: Arm
    seed: int
    words: tuple[str, ...]
    rate: float | None = None
    tuning: bool = False
    steps: int | None = None

    @property
    def name(self) -> str:
        return f"{self.arm.name}/" + (f"rate-{self.rate:g}" if self.tuning else f"seed-{self.seed}")

    @property
    def by_script(self) -> bool:
        return self.words[0] == "python"

    def command(self, folder: Path) -> str:
        """The command as it can be typed."""
        words = self.words if self.by_script else ("unfreeze", *self.words)
        return shlex.join([*words, "--out", str(folder)])

    def key(self) -> str:
        """Hash of the words, and of the files that they name, with what those name or import (reads.py)."""
        return digest(self.words, [str(file) for file in files_of(self.words)])


def tuning_runs(lab: Lab, steps: Mapping[str, int | None]) -> list[Run]:
    """One run for every arm and rate."""
    return [
        _run(lab, arm, TUNING_SEED, rate, steps[arm.name], tuning=True)
        for arm in lab.arms
        for rate in lab.learning_rates
    ]


def main_runs(lab: Lab, rates: Mapping[str, float], steps: Mapping[str, int | None]) -> list[Run]:
    """Every arm with every seed; all arms of one seed come before the next seed."""
    return [
        _run(lab, arm, seed, rates.get(arm.name), steps[arm.name])
        for seed in range(lab.seeds)
        for arm in lab.arms
    ]


def _run(
    lab: Lab, arm: Arm, seed: int, rate: float | None, steps: int | None, *, tuning: bool = False
) -> Run:
    words = [*lab.words(arm)]
    words += ["--steps", str(steps)] if steps is not None else []
    words += ["--learning-rate", f"{rate:g}"] if rate is not None else []
    return Run(arm, seed, (*words, "--seed", str(seed)), rate, tuning, steps)


def diverged(folder: Path) -> bool:
    """True if the run ended because a loss was not finite."""
    if not (folder / "events.jsonl").is_file():
        return False
    last = [event for event in read_events(folder / "events.jsonl") if event["kind"] == "train"][-1:]
    return bool(last) and last[0].get("loss", 0.0) is None


def measured(folder: Path, run: Run, value: str) -> dict[str, Any]:
    """Return value, rows, curve, tokens (of a command), flops, active and more (of a script)."""
    return of_script(folder / RESULT, run) if run.by_script else of_command(folder, run, value)


def of_command(folder: Path, run: Run, value: str) -> dict[str, Any]:
    """Read a run's events. Raises ConfigError if no event has the value."""
    events = cast(list[dict[str, Any]], read_events(folder / "events.jsonl"))
    trained = [event for event in events if event["kind"] == "train"]
    tokens = sum(event.get("tokens", 0) for event in trained)
    if value == TRAINED:
        losses = [(event["step"], event["loss"]) for event in trained if event.get("loss") is not None]
        end = [loss for _, loss in losses[-max(1, int(LAST * len(losses))) :]]
        mean = math.fsum(end) / len(end) if end and not diverged(folder) else None
        return {"value": mean, "rows": None, "curve": [list(each) for each in losses], "tokens": tokens}
    field = value.removeprefix(LOWEST)
    evals = [event for event in events if event["kind"] == "eval"]
    curve = [[event["step"], event[field]] for event in evals if _is_number(event.get(field))]
    if diverged(folder):
        return {"value": None, "rows": None, "curve": curve, "tokens": tokens}
    if not any(field in event for event in evals):
        fields = sorted(
            {name for event in evals for name, of in event.items() if _is_number(of)} - {"step", "time"}
        )
        if not fields:
            raise ConfigError(
                f"{run.name} has no validation, so no {value!r}", next="hold rows out: data.validation"
            )
        raise ConfigError(
            f"no validation of {run.name} has a value {value!r}{nearest(value, fields)}",
            next=f"value = one of {', '.join(fields)}, {TRAINED}",
        )
    lowest = min(curve, key=lambda each: each[1], default=None)
    shown = lowest if value != field else [evals[-1]["step"], evals[-1].get(field)]
    rows = _rows(folder, shown[0]) if shown and field == "loss" else None
    value_of = shown[1] if shown else None
    return {"value": value_of, "rows": rows, "curve": curve, "tokens": tokens, "more": _load(trained)}


def _load(trained: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """MaxVio and experts without a token, means over the layers of the last steps; {} without experts."""
    end = trained[-max(1, int(LAST * len(trained))) :]
    layers = [layer for event in end for layer in (event.get("expert_balance") or {}).values()]
    layers = [layer for layer in layers if layer["max_violation"] is not None]
    if not layers:
        return {}
    fields = {"MaxVio": "max_violation", "dead experts": "dead"}
    return {name: math.fsum(layer[field] for layer in layers) / len(layers) for name, field in fields.items()}


def _rows(folder: Path, step: int) -> list[list[float]] | None:
    """[sums, counts] of the loss by held-out row at that step; None if the last save has another step's."""
    from unfreeze.evaluate.by_row import ByRow
    from unfreeze.train.run import read_record, saves

    kept = saves(folder)
    lowest: dict[str, Any] = read_record(kept[-1]).get("heldout", {}).get("lowest") or {} if kept else {}
    if lowest.get("step") != step or "loss" not in lowest["rows"]:
        return None
    sums_R, counts_R = ByRow.of(lowest["rows"]).sums["loss"]
    return [[float(x) for x in sums_R], [float(x) for x in counts_R]]


def of_script(file: Path, run: Run) -> dict[str, Any]:
    """Read and check a script's result.json."""
    again = f"see {RESULT} in docs/howto/lab.md"
    if not file.is_file():
        raise ConfigError(f"{run.name}: the script left no {RESULT} in its --out", next=again)
    read = read_object(file, ConfigError)
    value, rows, curve, more = (read.get(name) for name in ("value", "rows", "curve", "more"))
    finite = _is_number(value) and math.isfinite(value)
    wrong = {
        "value": "value" not in read or not (value is None or _is_number(value)),
        "rows": finite and rows is not None and not (isinstance(rows, list) and all(map(_is_finite, rows))),
        "curve": curve is not None and not (isinstance(curve, list) and all(map(_is_pair, curve))),
        "more": more is not None and not (isinstance(more, dict) and all(map(_is_number, more.values()))),
        **{
            name: read.get(name) is not None and not (_is_finite(read[name]) and read[name] >= 0)
            for name in ("flops", "active", "total")
        },
    }
    if field := next((name for name, bad in wrong.items() if bad), ""):
        raise ConfigError(f"{run.name}: {RESULT} has {field} {read.get(field)!r:.40}", next=again)
    return {
        "value": value if finite else None,
        "rows": [rows, [1.0] * len(rows)] if finite and rows else None,
        "curve": curve or [],
        "more": more or {},
        **{name: read[name] for name in ("flops", "active", "total") if read.get(name) is not None},
    }


def _is_number(value: object) -> TypeGuard[float]:
    """True for a float, and for an integer that a float can hold."""
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    )


def _is_finite(value: object) -> TypeGuard[float]:
    return _is_number(value) and math.isfinite(value)


def _is_pair(value: object) -> bool:
    """True for [step, value]; the value of a run that diverges may be NaN."""
    if not isinstance(value, list) or len(pair := cast(list[Any], value)) != 2:
        return False
    return _is_finite(pair[0]) and _is_number(pair[1])
