"""Encode conversations of some 300 tokens, beside datasets.map with transformers' apply_chat_template.

`unfreeze dev bench data`, about 4 minutes; needs the `datasets` library.

Sides, in turn, each in a fresh process with caches of its own: all cores, one process, and the peer with as
many processes. The clock runs from the files to tokens with weights; loading the tokenizer is not part of it.
The peer makes tokens alone: without {% generation %} in the template it has no mask to give. "second start"
reads what the first encoded. Memory is that of the process that reads the files, at `rows` and at four times
as many.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.harness.kimi import TINY_K2
from benchmarks.harness.rows import Stamp
from benchmarks.harness.sides import python_path
from benchmarks.harness.training import Measured, appended_to, command, say, show
from unfreeze.config.parse import Folder, parse
from unfreeze.core.command import Common
from unfreeze.core.units import format_bytes
from unfreeze.parallel.machine import num_cores

LENGTH = 4096
COMPARED = 200
"""Rows whose ids are compared with the peer's."""
RUN = (
    "import importlib, json, sys; module, name = sys.argv[1].split(':');"
    " print(json.dumps(getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))))"
)


class Config(Measured):
    """What is measured."""

    rows: int = Field(default=60_000, ge=1, description="conversations of some 300 tokens")
    pairs: int = Field(default=3, ge=1, description="runs of each side, in turn; the median counts")
    model: Folder = Field(
        default="", description="checkpoint folder with the tokenizer and template; default: tiny-k2's"
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> rows, file."""
    return measure(parse(Config, arguments, command="dev bench data", description=__doc__ or ""), common)


def measure(config: Config, common: Common, peer: bool = True) -> dict[str, Any]:
    """The benchmark; `peer` False leaves the peer out."""
    stamp = Stamp.now("data", command("data", config), threads=config.threads or None)
    model, cores = config.model or str(TINY_K2), num_cores()
    sides = {
        "unfreeze": ("benchmarks.harness.encode_side:encode", {"length": LENGTH, "processes": cores}),
        "one process": ("benchmarks.harness.encode_side:encode", {"length": LENGTH, "processes": 1}),
        "datasets + transformers": ("benchmarks.harness.peers:tokenized", {"processes": cores}),
    }
    if not peer:
        del sides["datasets + transformers"]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in [*sides, "second start", "four times"]}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, times in (("rows", 1), ("many", 4)):
            write_rows(place / f"{name}.jsonl", times * config.rows)
        given = {"files": [str(place / "rows.jsonl")], "model": model, "first": COMPARED}
        for number in range(config.pairs):
            for name, (function, more) in sides.items():
                found[name].append(run(function, given | more, place / f"{name} {number}"))
            function, more = sides["unfreeze"]
            found["second start"].append(run(function, given | more, place / f"unfreeze {number}"))
            said = ", ".join(f"{name} {_rate(made[-1]):,.0f} rows/s" for name, made in found.items() if made)
            say(common)(f"{number + 1}/{config.pairs}: {said}")
        function, more = sides["unfreeze"]
        many = given | more | {"files": [str(place / "many.jsonl")], "first": 0}
        found["four times"] += [run(function, many, place / "many") for _ in range(2)]
    settings = {"rows": config.rows, "pairs": config.pairs, "model": Path(model).name, "processes": cores}
    made = [stamp.row(name, settings, _results(name, found)) for name in [*sides, "second start"]]
    return show(made, appended_to(config), common)


def write_rows(path: Path, count: int) -> None:
    """Conversations of one to three questions, put together from the demo's rows; the same every time."""
    lines = (TINY_K2 / "yoda_train.jsonl").read_text(encoding="utf-8").splitlines()
    pairs, draw = [json.loads(line) for line in lines], random.Random(0)

    def said(name: str, least: int, most: int) -> str:
        return " ".join(pair[name] for pair in draw.choices(pairs, k=draw.randint(least, most)))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = [{"role": "system", "content": "Short answers, please."}] * (draw.random() < 0.3)
            for _ in range(draw.choice((1, 2, 2, 3))):
                messages.append({"role": "user", "content": said("question", 1, 4)})
                messages.append({"role": "assistant", "content": said("answer", 4, 10)})
            file.write(json.dumps({"messages": messages}) + "\n")


def run(function: str, given: dict[str, Any], cache: Path) -> dict[str, Any]:
    """One side in a process of its own, with this folder as its caches."""
    caches = {
        "XDG_CACHE_HOME": str(cache),
        "HF_HOME": str(cache),
        "HF_DATASETS_CACHE": str(cache / "datasets"),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, function, json.dumps(given)],
        env=os.environ
        | caches
        | {"PYTHONPATH": python_path()}
        | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{function} ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _rate(made: dict[str, Any]) -> float:
    return made["rows"] / made["seconds"]


def _median(made: list[dict[str, Any]]) -> float:
    return statistics.median(map(_rate, made))


def _results(name: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    made, ours = found[name], _median(found["unfreeze"])
    seconds = statistics.median(run["seconds"] for run in made)
    results: dict[str, Any] = {
        "rows_per_second": _median(made),
        "fastest": max(map(_rate, made)),
        "slowest": min(map(_rate, made)),
        "seconds": seconds,
        "tokens_per_row": made[0]["tokens"] / made[0]["rows"],
        "peak_bytes": max(run["peak_bytes"] for run in made),
    }
    note = (
        f"{results['rows_per_second']:,.0f} rows/s ({results['slowest']:,.0f} to {results['fastest']:,.0f})"
    )
    if name == "datasets + transformers":
        same = sum(a == b for a, b in zip(made[0]["ids"], found["unfreeze"][0]["ids"], strict=True))
        results |= {"first_side_rate": ours / _median(made), "equal_rows": same, "compared_rows": COMPARED}
        note += (
            f"; the first side is {results['first_side_rate']:.2f} x; ids of {same} of {COMPARED} rows equal"
        )
    if name == "second start":
        big = found["four times"]
        results |= {
            "own_peak_bytes": made[0]["own_peak_bytes"],
            "four_times_own_peak_bytes": big[1]["own_peak_bytes"],
            "first_own_peak_bytes": found["unfreeze"][0]["own_peak_bytes"],
            "first_four_times_own_peak_bytes": big[0]["own_peak_bytes"],
        }
        note = (
            f"{seconds:.2f} s for {made[0]['rows']:,} rows; memory {format_bytes(results['own_peak_bytes'])},"
            f" of four times the rows {format_bytes(results['four_times_own_peak_bytes'])}; while encoding"
            f" {format_bytes(results['first_own_peak_bytes'])} and"
            f" {format_bytes(results['first_four_times_own_peak_bytes'])}"
        )
    return results | {"note": note}
