"""Time a run on tiny-k2 from Enter to its first training step.

`unfreeze dev bench start`, about 2 minutes.

"first" is the first run on a machine: its loops are compiled and its rows encoded, with an empty cache of
its own. "warm" is every run after it. The two take turns. The clock starts before the interpreter does and
ends at the time in the run's first "train" event. The answers sampled before training are part of it, as in a
user's run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks.harness.kimi import TINY_K2
from benchmarks.harness.rows import Stamp
from benchmarks.harness.training import Measured, appended_to, command, say, show
from unfreeze.config.parse import parse
from unfreeze.core.command import Common
from unfreeze.kernels.precision import precision


class Config(Measured):
    """What is measured."""

    pairs: int = Field(default=3, ge=1, description="first and warm starts; the median counts")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(default="auto", description="dtype of the run")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> rows, file."""
    return measure(parse(Config, arguments, command="dev bench start", description=__doc__ or ""), common)


def measure(config: Config, common: Common, data: str = "") -> dict[str, Any]:
    """The benchmark; `data` replaces the rows of the demo."""
    stamp = Stamp.now("start", command("start", config), threads=config.threads or None)
    rows = data or str(TINY_K2 / "yoda_train.jsonl")
    found: dict[str, list[float]] = {"first": [], "warm": []}
    for number in range(1, config.pairs + 1):
        with tempfile.TemporaryDirectory() as folder:
            for side, seconds in found.items():
                seconds.append(first_step(Path(folder), side, rows, config))
        said = ", ".join(f"{side} {seconds[-1]:.1f} s" for side, seconds in found.items())
        say(common)(f"pair {number}/{config.pairs}: {said}")
    settings = {"model": "tiny-k2", "pairs": config.pairs, "dtype": precision(config.dtype, "cpu").name}
    made = [stamp.row(side, settings, _results(seconds)) for side, seconds in found.items()]
    return show(made, appended_to(config), common)


def first_step(folder: Path, side: str, data: str, config: Config) -> float:
    """One run of two steps in a process of its own -> seconds to its first step.

    `folder` holds the caches of compiled loops and encoded rows that the first start fills and the warm one
    finds.
    """
    words = [
        "sft",
        "--model",
        str(TINY_K2),
        "--data",
        data,
        "--steps",
        "2",
        "--dtype",
        config.dtype,
        "--quiet",
    ]
    threads = ["--threads", str(config.threads)] if config.threads else []
    run = [sys.executable, "-m", "unfreeze", *words, *threads, "--out", str(folder / side)]
    started = time.time()
    cache = str(folder / "cache")
    environment = os.environ | {"NUMBA_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the run that was to be timed ended with {done.returncode}: {done.stderr[-500:]}")
    lines = (folder / side / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return next(event["time"] for event in map(json.loads, lines) if event["kind"] == "train") - started


def _results(seconds: list[float]) -> dict[str, Any]:
    middle = statistics.median(seconds)
    spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
    return {
        "seconds": middle,
        "fastest": min(seconds),
        "slowest": max(seconds),
        "note": f"{middle:.1f} s from Enter to the first step ({spread})",
    }
