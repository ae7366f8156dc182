"""Encode conversations of some 300 tokens, beside datasets.map with transformers' apply_chat_template.

`unfreeze dev bench data`, about 4 minutes; needs the `datasets` library. Sides, in turn, each in a fresh
process with its own caches: all cores, one process, and the peer with one process per core. The time is from
the files to tokens with weights, without loading the tokenizer. The peer makes tokens only, no loss mask:
its mask needs {% generation %} in the template. "second start" reads the cache that the first run wrote.
Memory is that of the process that reads the files, at `rows` and at four times as many.
"""

import tempfile
from pathlib import Path

from pydantic import Field

from benchmarks.harness.case import Measured, Run, pick
from benchmarks.harness.encoding import rates, write_rows
from benchmarks.harness.fresh import call
from benchmarks.harness.shapes import TINY_K2
from unfreeze.config.parse import Folder
from unfreeze.core.units import format_bytes
from unfreeze.parallel.machine import num_cores

LENGTH, COMPARED, PEER = 4096, 200, "datasets + transformers"


class Config(Measured):
    rows: int = Field(default=60_000, ge=1, description="conversations of some 300 tokens")
    pairs: int = Field(default=3, ge=1, description="runs of each side, in turn; the median counts")
    model: Folder = Field(default=str(TINY_K2), description="folder with the tokenizer and template")


def rows(config: Config, run: Run):
    ours, cores = "benchmarks.harness.encoding:encode", num_cores()
    sides = {"unfreeze": (ours, {"length": LENGTH, "processes": cores})}
    sides["one process"] = ours, {"length": LENGTH, "processes": 1}
    sides |= {PEER: ("benchmarks.harness.encoding:tokenized", {"processes": cores})}
    replies = {name: [] for name in [*sides, "second start", "four times"]}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_rows(place / "rows.jsonl", config.rows)
        write_rows(place / "many.jsonl", 4 * config.rows)
        options = {"files": [str(place / "rows.jsonl")], "model": config.model, "first": COMPARED}
        for number in range(config.pairs):
            for name, cache in [*zip(sides, sides, strict=True), ("second start", "unfreeze")]:
                function, more = sides[cache]
                replies[name].append(call(function, options | more, place / f"{cache} {number}"))
                run.say(f"{number + 1}/{config.pairs}: {name} {replies[name][-1]['seconds']:.2f} s")
        many = options | sides["unfreeze"][1] | {"files": [str(place / "many.jsonl")], "first": 0}
        replies["four times"] += [call(ours, many, place / "many") for _ in range(2)]
    entries = {name: rates(runs) for name, runs in replies.items()}
    ratio = entries["unfreeze"]["rows_per_second"] / entries[PEER]["rows_per_second"]
    same = sum(a == b for a, b in zip(replies[PEER][0]["ids"], replies["unfreeze"][0]["ids"], strict=True))
    entries[PEER] |= {"first_side_rate": ratio, "equal_rows": same, "compared_rows": COMPARED}
    entries[PEER]["note"] += f"; the first side is {ratio:.2f} x; ids of {same} of {COMPARED} rows equal"
    own, four = (replies[name][-1]["own_peak_bytes"] for name in ("second start", "four times"))
    entries["second start"] |= {"own_peak_bytes": own, "four_times_own_peak_bytes": four}
    entries["second start"]["note"] += f"; memory {format_bytes(own)}, of 4 x the rows {format_bytes(four)}"
    settings = pick(config, "rows", "pairs") | {"model": Path(config.model).name, "processes": cores}
    for name in [*sides, "second start"]:
        yield run.row(name, settings, entries[name])
