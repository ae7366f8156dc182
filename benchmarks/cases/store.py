"""Random reads of the token store, beside the tokens that a training step takes in the same time.

`unfreeze dev bench store`, about 2 minutes. The need is that of a small model, whose steps are quick: LoRA on
a small Kimi-format model, 4,096 tokens a step. The store is read by random documents of some 300 tokens until
a step's tokens are there, each document checked by its checksum: once after its pages were dropped from
memory, and once more. The bar is 100 steps' tokens in the time of one step.
"""

import tempfile
from pathlib import Path

from pydantic import Field

from benchmarks.cases.growth import LENGTH, LORA, SIZES
from benchmarks.harness import shapes
from benchmarks.harness.case import Run, Trained
from benchmarks.harness.encoding import write_rows
from benchmarks.harness.fresh import call
from benchmarks.harness.training import job, whole


class Config(Trained):
    steps: int = Field(default=3, ge=1, description="timed training steps; the median counts")
    tokens: int = Field(default=4096, ge=1, description="tokens per step")
    rows: int = Field(default=60_000, ge=1, description="conversations of some 300 tokens in the store")
    reads: int = Field(default=200, ge=1, description="timed reads of a step's tokens; the median counts")


def rows(config: Config, run: Run):
    whole((config.tokens,), LENGTH)
    model = shapes.kimi(**SIZES)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(file, config.rows)
        settings = {"file": str(file), "model": str(shapes.TINY_K2), "length": 4096}
        settings |= {"tokens": config.tokens, "reads": config.reads}
        timed = call("benchmarks.harness.stored:read", settings, Path(folder) / "cache")
    run.say(f"{config.tokens} tokens in {1e3 * timed['cold_seconds']:.2f} ms cold")
    with job(run, model, model, SIZES, LORA, config.tokens // LENGTH, LENGTH) as training:
        entry = training.in_turn([training.ours("unfreeze", "selective")])["unfreeze"]
    step = config.tokens / entry["tokens_per_second"]
    times = {name: step / timed[f"{name}_seconds"] for name in ("cold", "warm")}
    note = (
        f"a step takes {1e3 * step:.0f} ms; its tokens are read {times['cold']:,.0f} times in that time from"
    )
    note += (
        f" dropped pages, {times['warm']:,.0f} times again; slowest read {1e3 * timed['cold_slowest']:.1f} ms"
    )
    settings = training.settings | {"rows": config.rows, "reads": config.reads}
    yield run.row("unfreeze", settings, timed | entry | {"times": times, "step_seconds": step, "note": note})
