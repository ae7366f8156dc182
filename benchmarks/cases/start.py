"""Time a run on tiny-k2 from Enter to its first training step.

`unfreeze dev bench start`, about 2 minutes. "first" is the first run on a machine: with an empty cache it
compiles its loops and encodes its rows. "warm" is every later run. The two take turns. The clock starts
before the interpreter does and stops at the time in the run's first "train" event. The answers sampled before
training are part of it, as in a user's run.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from pydantic import Field

from benchmarks.harness.case import Measured, Run
from benchmarks.harness.fresh import process
from benchmarks.harness.shapes import TINY_K2
from unfreeze.kernels.precision import precision

ROWS = TINY_K2 / "yoda_train.jsonl"


class Config(Measured):
    """Flags of this benchmark."""

    pairs: int = Field(default=3, ge=1, description="first and warm starts; the median counts")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(default="auto", description="dtype of the run")


def first_step(folder: Path, side: str, config: Config) -> float:
    """One run of two steps in a process of its own -> seconds to its first step; `folder` has its caches."""
    words = ["sft", "--model", TINY_K2, "--data", ROWS, "--steps", 2, "--dtype", config.dtype, "--quiet"]
    words += ["--threads", config.threads] if config.threads else []
    started, cache = time.time(), str(folder / "cache")
    run = [sys.executable, "-m", "unfreeze", *map(str, words), "--out", str(folder / side)]
    process(run, NUMBA_CACHE_DIR=cache, XDG_CACHE_HOME=cache)
    lines = (folder / side / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return next(event["time"] for event in map(json.loads, lines) if event["kind"] == "train") - started


def rows(config: Config, run: Run):
    times: dict[str, list[float]] = {"first": [], "warm": []}
    for number in range(1, config.pairs + 1):
        with tempfile.TemporaryDirectory() as folder:
            for side, seconds in times.items():
                seconds.append(first_step(Path(folder), side, config))
        run.say(f"pair {number}/{config.pairs}: {', '.join(f'{s} {t[-1]:.1f} s' for s, t in times.items())}")
    settings = {"model": "tiny-k2", "pairs": config.pairs, "dtype": precision(config.dtype, "cpu").name}
    for side, seconds in times.items():
        middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
        note = f"{middle:.1f} s from Enter to the first step ({least:.1f} to {most:.1f})"
        yield run.row(side, settings, {"seconds": middle, "fastest": least, "slowest": most, "note": note})
