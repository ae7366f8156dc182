"""Compare the plans of some twenty small runs with the bytes and seconds that the runs took.

`unfreeze dev bench plan`, about 10 minutes, on one core unless --threads says more. Each run is a process of
its own: a model of random weights, adapters or all of its weights, one warm-up step, then timed steps.
Written to docs/measured/plan_checked.md, or --out; the page says how each figure is measured.
"""

from pathlib import Path

from pydantic import Field

from benchmarks.harness.case import Measured, Run
from benchmarks.harness.plancheck import One, cells, checked, page
from unfreeze.config.parse import Folder, writing

RUNS = (
    One("tiny-k2", dtype="float32", documents=32, length=128),
    One("tiny-k2", rank=16, documents=8, length=512, recompute="layers"),
    One("kimi"),
    One("kimi", rank=32, documents=4),
    One("kimi", rank=64, documents=4, moments="int8"),
    One("kimi", recompute="layers"),
    One("kimi", recompute="nothing", documents=2),
    One("kimi", documents=1, length=4096),
    One("kimi", documents=4, dtype="float32"),
    One("qwen3_moe", documents=4),
    One("qwen3_moe", documents=4, rank=32, recompute="layers"),
    One("qwen3_moe", documents=8, length=128, dtype="float32"),
    One("qwen3_moe", documents=2, rank=None),
    One("llama", documents=4),
    One("llama", documents=4, rank=64, recompute="nothing"),
    One("llama", documents=4, rank=None),
    One("llama", documents=2, rank=None, dtype="float32", recompute="layers"),
    One("llama", documents=2, length=2048, recompute="elementwise"),
    One("qwen2", documents=8, rank=16),
    One("qwen2", documents=4, rank=None, moments="int8", recompute="elementwise"),
    One("qwen2", documents=2, length=1024, rank=4, dtype="float32", recompute="layers"),
)


class Config(Measured):
    """Flags of this benchmark."""

    threads: int = Field(default=1, ge=1, description="torch's threads in each process")
    steps: int = Field(default=3, ge=1, description="timed steps of each run; the median counts")
    only: tuple[str, ...] = Field(
        default=(), description="runs whose name starts with one of these; default: all"
    )
    out: Folder = Field(default="", description="the page; default: docs/measured/plan_checked.md")


def written(config: Config, run: Run):
    out, results = Path(config.out or Path(__file__).parents[2] / "docs" / "measured" / "plan_checked.md"), []
    for one in RUNS:
        if one.name.startswith(config.only or ("",)):
            results.append(checked(one, run))
            run.say(" | ".join(cells(results[-1])))
    with writing(out, "out"):
        out.write_text(page(run.stamp, results), encoding="utf-8")
    return {"file": str(out), "rows": results}
