"""What the training benchmarks share: sides that step in turn, their results as rows, and the one table.

A side's results: tokens_per_second (median step), fastest, slowest, steps; peak_bytes while training,
load_peak_bytes, load_seconds; what weights, gradients and optimizer take (state_bytes) and the peak above
them; losses; correctness. A peer's row also says how many times as fast the first side is and the share of
its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from benchmarks.harness.job import errors
from benchmarks.harness.rows import Row, append, where
from benchmarks.harness.sides import Side, Sides
from unfreeze.config.parse import Folder, Frozen
from unfreeze.core.command import Common
from unfreeze.core.units import format_bytes
from unfreeze.kernels.precision import AUTO, precision
from unfreeze.report.tables import align

STATE = ("weights", "gradients", "optimizer")


class Measured(Frozen):
    """The fields every benchmark has."""

    append: Folder = Field(
        default="",
        description=(
            "file the rows are appended to; default: benchmarks/results/<device>.jsonl of the checkout"
        ),
    )
    threads: int = Field(
        default=0, ge=0, description="torch's threads in each side's process; 0: one per core"
    )


class Placed(Frozen):
    """And the field of those that run on a GPU too."""

    device: Literal["cpu", "cuda"] = Field(
        default="cpu", description="where all sides run; rows go to the file of that device"
    )


class Computed(Placed):
    """And that of those that compute in the hardware's own number format."""

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="number format of all sides. auto: bfloat16 where the hardware multiplies it",
    )

    @property
    def computed(self) -> str:
        """The dtype that "auto" is here."""
        return precision(self.dtype, self.device).name


class MeasuredInTurn(Measured):
    """And those of benchmarks that step in turn."""

    steps: int = Field(default=3, ge=1, description="timed steps of each side; the median counts")
    warmup: int = Field(default=1, ge=0, description="steps of each side before those")


class Trained(Computed, MeasuredInTurn):
    """And those of benchmarks of whole training steps on a checkpoint that is made for them."""

    checkpoint: Folder = Field(
        default="",
        description="folder where the random checkpoint is, or is made and kept; default: a temporary one",
    )


def computed_here() -> str:
    """The dtype that "auto" is on this CPU."""
    return precision(AUTO, "cpu").name


def both_sizes(
    made: Callable[..., dict[str, Any]], sizes: Mapping[str, int] | None, smaller: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json of the model at `sizes`, and of the one with `smaller` for the float64 comparison."""
    return made(**(sizes or {})), made(**{**(sizes or {}), **smaller})


def settings_of(
    model: Mapping[str, Any],
    small: Mapping[str, Any],
    names: Iterable[str],
    config: Trained,
    documents: int,
    length: int,
) -> dict[str, Any]:
    """What every row of a training benchmark says of its job. names: the sizes in config.json."""
    names = tuple(names)
    return {
        "shape": {name: model[name] for name in names},
        "checked": {name: small[name] for name in names if small[name] != model[name]},
        "dtype": config.computed,
        "documents": documents,
        "length": length,
        "tokens_per_step": documents * length,
        "steps": config.steps,
        "warmup": config.warmup,
        "device": config.device,
    }


def float64(checked: str, lora: Mapping[str, Any] | None, length: int, common: Common) -> dict[str, Any]:
    """What `job.check` finds in float64, in a process of its own that has ended when this returns."""
    side = Side(
        "float64", "benchmarks.harness.job:exact", {"checked": checked, "lora": lora, "length": length}
    )
    with Sides([side], say(common)):
        return side.loaded


def step_in_turn(
    sides: Sequence[Side],
    config: MeasuredInTurn,
    tokens: int,
    exact: Mapping[str, Any],
    common: Common,
    *,
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Load all sides, let them step in turn, check each against `exact`; side -> results.

    own: side -> what it is checked against instead, where sides have checkpoints of their own.
    Sides without a call "check" (the GEMM rate) give their replies only.
    """
    found: dict[str, dict[str, Any]] = {}
    with Sides(sides, say(common)) as running:
        running.take_turns("step", warmup=config.warmup, rounds=config.steps)
        for side in running:
            found[side.name] = (
                results(side, tokens, (own or {}).get(side.name, exact))
                if "trained_parameters" in side.loaded
                else {"replies": side.replies["step"]}
            )
    first = next(iter(found.values()))
    for other in [entry for entry in found.values() if "tokens_per_second" in entry][1:]:
        other["first_side_speed"] = first["tokens_per_second"] / other["tokens_per_second"]
        other["first_side_memory"] = first["peak_bytes"] / other["peak_bytes"]
        other["first_side_above_state"] = first["above_state_bytes"] / max(1, other["above_state_bytes"])
    return found


def results(side: Side, tokens: int, exact: Mapping[str, Any]) -> dict[str, Any]:
    """One side's results after its steps; asks it for its state and its check."""
    seconds = sorted(side.values("step", "seconds"))
    state = side.call("state")
    return {
        "tokens_per_second": tokens / side.median("seconds"),
        "fastest": tokens / seconds[0],
        "slowest": tokens / seconds[-1],
        "step_seconds": side.median("seconds"),
        "cpu_seconds": side.median("cpu_seconds"),
        "steps": len(seconds),
        "peak_bytes": side.peak(),
        "load_peak_bytes": side.loaded["load_peak"],
        "load_seconds": side.loaded["load_seconds"],
        "state_bytes": {name: state[name] for name in STATE},
        "above_state_bytes": side.peak() - sum(state[name] for name in STATE),
        "runtime_bytes": side.loaded["runtime_bytes"],
        "trained_parameters": side.loaded["trained_parameters"],
        "loss_first": side.values("step", "loss")[0],
        "loss_last": side.values("step", "loss")[-1],
        "correctness": errors(side.call("check", fresh_peak=True), exact),
    }


def show(rows: Sequence[Row], path: Any, common: Common) -> dict[str, Any]:
    """Append the rows, print the table (to stderr where stdout carries JSON). -> what the command returns."""
    append(rows, path)
    if not common.quiet:
        out = sys.stderr if common.json else sys.stdout
        print(table(rows), file=out)
        print(
            (
                f"appended {len(rows)} rows to {path}"
                if path
                else "not appended: no source checkout here; --append FILE keeps the rows"
            ),
            file=out,
        )
    return {"rows": [row.model_dump() for row in rows], "file": str(path) if path else None}


def appended_to(config: Measured, device: str = "cpu") -> Any:
    """Where the rows of this run go."""
    return where(config.append, device)


def table(rows: Sequence[Row]) -> str:
    """The rows of training sides for a terminal."""
    head = (
        "side",
        "tokens/s",
        "fastest",
        "slowest",
        "peak",
        "above state",
        "loading",
        "first side is",
        "of its memory",
        "error",
    )
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        r = row.results
        if "tokens_per_second" not in r:
            continue
        ratio = (
            (f"{r['first_side_speed']:.2f} x", f"{r['first_side_memory']:.2f}")
            if "first_side_speed" in r
            else ("", "")
        )
        lines.append(
            (
                row.side,
                *(f"{r[name]:,.1f}" for name in ("tokens_per_second", "fastest", "slowest")),
                format_bytes(r["peak_bytes"]),
                *(
                    format_bytes(r[name]) if name in r else ""
                    for name in ("above_state_bytes", "load_peak_bytes")
                ),
                *ratio,
                worst(r["correctness"]),
            )
        )
    notes = [f"{row.side}: not run: {row.not_run}" for row in rows if row.not_run]
    notes += [f"{row.side}: {row.results['note']}" for row in rows if "note" in row.results]
    return "\n".join([*([align(lines)] if len(lines) > 1 else []), *notes])


def worst(correctness: Mapping[str, Any]) -> str:
    """The largest relative error, for a column."""
    numbers = [value for value in correctness.values() if not isinstance(value, str)]
    return f"{max(numbers):.1e}" if numbers else "none"


def say(common: Common) -> Any:
    """One line of progress on stderr, nothing when quiet."""
    return lambda line: None if common.quiet else print(line, file=sys.stderr, flush=True)


def command(name: str, config: Frozen) -> str:
    """The command line that measures the same again: every flag that isn't its default."""
    flags = []
    for field, info in type(config).model_fields.items():
        value = getattr(config, field)
        if value != info.default and field not in ("append", "checkpoint"):
            values = value if isinstance(value, tuple) else (value,)
            flags += [f"--{field.replace('_', '-')}", *map(str, values)]
    return " ".join(["unfreeze dev bench", name, *flags])
