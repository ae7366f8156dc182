"""The interface of a case: `Config`, its flags, and `rows(config, run)`, which measures and yields rows.

The harness parses the flags, stamps the rows, appends them to benchmarks/results/<device>.jsonl and prints
them. A case that writes a page instead has `written(config, run)`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

from pydantic import Field

from benchmarks.harness.rows import Row, Stamp, append, where
from benchmarks.harness.sides import Side
from unfreeze.config.parse import Folder, Frozen, parse
from unfreeze.core.command import Common
from unfreeze.core.units import format_bytes
from unfreeze.kernels.precision import AUTO, precision
from unfreeze.report.tables import align

UNNAMED = ("append", "checkpoint", "out", "write")
"""Flags that a row's command omits: they do not change what is measured."""


class Measured(Frozen):
    """Flags of every case."""

    append: Folder = Field(
        default="", description="file the rows are appended to; default: benchmarks/results/<device>.jsonl"
    )
    threads: int = Field(default=0, ge=0, description="torch's threads in each process; 0: one per core")


class Placed(Measured):
    """Flags of cases that also run on a GPU."""

    device: Literal["cpu", "cuda"] = Field(
        default="cpu", description="where all sides run; rows go to the file of that device"
    )


class InTurn(Measured):
    """Flags of cases whose sides step in turn."""

    steps: int = Field(default=3, ge=1, description="timed steps of each side; the median counts")
    warmup: int = Field(default=1, ge=0, description="steps of each side before those")


class OnCheckpoint(Measured):
    """Flags of cases that make a checkpoint of random weights."""

    checkpoint: Folder = Field(
        default="",
        description="folder where the random checkpoint is, or is made and kept; default: a temporary one",
    )


class Computed(Placed):
    """Flags of cases that compute in the dtype the hardware multiplies."""

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="number format of all sides. auto: bfloat16 where the hardware multiplies it",
    )

    @property
    def computed(self) -> str:
        """The dtype in use; "auto" is resolved for this device."""
        return precision(self.dtype, self.device).name


class Trained(Computed, InTurn, OnCheckpoint):
    """Flags of cases that run whole training steps."""


def pick(of: Any, *names: str) -> dict[str, Any]:
    """The named fields of a config, or entries of a config.json."""
    return {name: of[name] if isinstance(of, Mapping) else getattr(of, name) for name in names}


def computed_here() -> str:
    """The dtype that "auto" resolves to on this CPU."""
    return precision(AUTO, "cpu").name


@dataclass(frozen=True)
class Run:
    """One run of a case. threads: where the flag is 0 and the case's own is not all cores."""

    name: str
    config: Any
    common: Common

    @cached_property
    def stamp(self) -> Stamp:
        """The fields that all its rows share. Raises ConfigError if the device is missing."""
        return Stamp.now(self.name, command(self.name, self.config), self.device, self.config.threads or None)

    @property
    def device(self) -> str:
        return getattr(self.config, "device", "cpu")

    def say(self, line: str) -> None:
        """One line of progress on stderr, nothing when quiet."""
        if not self.common.quiet:
            print(line, file=sys.stderr, flush=True)

    def side(self, name: str, function: str, **arguments: Any) -> Side:
        """function: "module:name" under benchmarks.harness or benchmarks.cases."""
        return Side(name, f"benchmarks.{function}", arguments, threads=self.config.threads)

    def row(
        self, side: str, settings: Mapping[str, Any], results: Mapping[str, Any] | None = None, **more: Any
    ):
        return self.stamp.row(side, settings, results, **more)


def run(name: str, case: ModuleType, arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, measure, append, print; -> rows and their file, or the result of a case that writes a page."""
    parsed = parse(
        case.Config,
        arguments,
        command=f"dev bench {name}",
        description=case.__doc__ or "",
        positional=getattr(case, "POSITIONAL", False),
    )
    return measured(name, case, parsed, common)


def measured(name: str, case: ModuleType, config: Any, common: Common) -> dict[str, Any]:
    """`run` with a parsed Config."""
    this = Run(name, config, common)
    if hasattr(case, "written"):
        return case.written(config, this)
    this.stamp  # noqa: B018 - a device that isn't here is refused before any work
    rows, path = list(case.rows(config, this)), where(config.append, this.device)
    append(rows, path)
    if not common.quiet:
        print(f"{table(rows)}\nappended {len(rows)} rows to {path}", file=sys.stderr if common.json else None)
    return {"rows": [row.model_dump() for row in rows], "file": str(path)}


SPEEDS = ("tokens_per_second", "fastest", "slowest")
MEMORY = ("peak_bytes", "above_state_bytes", "load_peak_bytes")
HEAD = "side|tokens/s|fastest|slowest|peak|above state|loading|first side is|of its memory|error"


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal: a table of the sides with a speed, then the notes."""
    lines: list[tuple[str, ...]] = [tuple(HEAD.split("|"))]
    for side, r in ((row.side, row.results) for row in rows if "tokens_per_second" in row.results):
        speeds = (f"{r[name]:,.1f}" if name in r else "" for name in SPEEDS)
        memory = (format_bytes(r[name]) if name in r else "" for name in MEMORY)
        times = f"{r['first_side_speed']:.2f} x" if "first_side_speed" in r else ""
        share = f"{r['first_side_memory']:.2f}" if "first_side_memory" in r else ""
        lines.append((side, *speeds, *memory, times, share, worst(r["correctness"])))
    notes = [f"{row.side}: not run: {row.not_run}" for row in rows if row.not_run]
    notes += [f"{row.side}: {row.results['note']}" for row in rows if "note" in row.results]
    return "\n".join([*([align(lines)] if len(lines) > 1 else []), *notes])


def worst(correctness: Mapping[str, Any]) -> str:
    """The largest relative error, for a column."""
    numbers = [value for value in correctness.values() if not isinstance(value, str)]
    return f"{max(numbers):.1e}" if numbers else "none"


def command(name: str, config: Frozen) -> str:
    """The command line that repeats the measurement: every flag with a value other than its default."""
    words = []
    for field, info in type(config).model_fields.items():
        value = getattr(config, field)
        if value != info.default and field not in UNNAMED:
            values = [str(each) for each in (value if isinstance(value, tuple) else (value,))]
            flag = f"--{field.replace('_', '-')}"
            if values[:1] and values[0].startswith("-"):  # a text of flags of another program
                words.append(f"{flag}={shlex.quote(' '.join(values))}")
            else:
                words += values if field == "job" else [flag, *values]
    return " ".join(["unfreeze dev bench", name, *words])
