"""Rows: the results of a benchmark, one JSON line per side.

Each row has the machine, versions, commit and settings it was measured with.

    stamp = Stamp.now("moe", command, device)          one per run: all its rows carry the same `run`
    row = stamp.row("unfreeze", settings, results)     a speed without peak memory and correctness is refused
    append(rows, where("", device))                    benchmarks/results/<device>.jsonl
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unfreeze.core.errors import DataError
from unfreeze.core.source import commit
from unfreeze.generate.open import device_of
from unfreeze.kernels.choice.choose import device_key
from unfreeze.parallel.machine import PROC, hardware, num_cores

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("torch", "numba", "triton", "transformers", "peft", "liger-kernel")
SPEEDS = ("tokens_per_second", "gb_per_second", "ms")
"""Fields of `results` that are speeds: beside each must stand peak_bytes and correctness."""


class Machine(BaseModel):
    """The machine a row was measured on.

    name: of the processor or GPU. family, model: the processor's numbers, "" on a GPU. threads: torch's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    device: str
    name: str
    family: str = ""
    model: str = ""
    cores: int = Field(ge=1)
    threads: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)
    python: str
    versions: dict[str, str]


class Row(BaseModel):
    """One side of one run.

    run: the same for all sides that stepped in turn; it sorts by time. settings: all of them, defaults
    included.
    results["correctness"]: the comparison -> its relative error (float), or the reason why nothing was
    compared (str).
    not_run: why this side was not measured here; its results are empty then.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    benchmark: str = Field(min_length=1)
    run: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
    command: str
    commit: str | None
    machine: Machine
    settings: dict[str, Any]
    side: str = Field(min_length=1)
    results: dict[str, Any] = {}
    not_run: str = ""

    @model_validator(mode="after")
    def _whole(self) -> Row:
        if bool(self.results) == bool(self.not_run):
            raise ValueError("a row has results, or says in not_run why there are none")
        speeds = [name for name in SPEEDS if name in self.results]
        missing = [name for name in ("peak_bytes", "correctness") if name not in self.results]
        if speeds and missing:
            raise ValueError(f"results have {speeds[0]} without {' and '.join(missing)}")
        if speeds and not self.results["correctness"]:
            raise ValueError(
                "results.correctness is empty; give a relative error, or the reason why there is none"
            )
        return self


def machine(device: torch.device | str = "cpu", threads: int | None = None) -> Machine:
    """This machine. threads: of the measuring processes; default: torch's in this process."""
    place = torch.device(device)
    here = hardware(place)
    info = (PROC / "cpuinfo").read_text() if place.type == "cpu" and (PROC / "cpuinfo").exists() else ""
    family, model = (
        re.search(rf"^{field}\s*:\s*(\d+)", info, re.MULTILINE) for field in ("cpu family", "model")
    )
    return Machine(
        device=device_key(place),
        name=here.name,
        family=family[1] if family else "",
        model=model[1] if model else "",
        cores=here.cores,
        threads=threads or torch.get_num_threads(),
        memory_bytes=here.total,
        python=platform.python_version(),
        versions={name: version for name in LIBRARIES if (version := installed(name))},
    )


def installed(distribution: str) -> str:
    """The version of a distribution, without importing it; "" if it is not installed."""
    if distribution == "torch":
        return torch.__version__  # with the build: 2.13.0+cpu
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


class Stamp(BaseModel):
    """The fields that all rows of one run share."""

    model_config = ConfigDict(frozen=True)
    benchmark: str
    run: str
    command: str
    commit: str | None
    machine: Machine

    @classmethod
    def now(
        cls, benchmark: str, command: str, device: torch.device | str = "cpu", threads: int | None = None
    ) -> Stamp:
        """Stamp this moment. Raises ConfigError if the device is missing."""
        run, place = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), device_of(str(device))
        return cls(
            benchmark=benchmark,
            run=run,
            command=command,
            commit=commit(),
            machine=machine(place, threads or num_cores()),
        )

    def row(
        self,
        side: str,
        settings: Mapping[str, Any],
        results: Mapping[str, Any] | None = None,
        *,
        not_run: str = "",
    ) -> Row:
        """Raises ValueError for results with a speed but without memory or correctness."""
        return Row(
            **self.__dict__, side=side, settings=dict(settings), results=dict(results or {}), not_run=not_run
        )


def where(path: str, device: torch.device | str = "cpu") -> Path:
    """The file that rows are appended to: `path`, or benchmarks/results/<device>.jsonl if it is empty."""
    return Path(path) if path else RESULTS / f"{device_key(torch.device(device))}.jsonl"


def append(rows: Sequence[Row], path: Path) -> None:
    """Append the rows to a .jsonl file in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row.model_dump(), ensure_ascii=False) + "\n" for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Row]:
    """Every row of a file. Raises DataError with the line and its fault."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(Row.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the row"
            raise DataError(
                f"{path}:{number}: {place}: {first['msg']}", next="remove or mend the line"
            ) from None
    return rows
