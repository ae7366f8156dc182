"""Say where the time of one step goes, op by op, beside the GEMM rate of a core.

`unfreeze dev bench profile moe|dense|decode|growth`, 1 to 2 minutes. One step of our side of that benchmark
(of decode: 32 tokens) under torch's profiler, on one core, so that times add up to the step's. Numba loops
are listed by name. GEMMs come with their FLOP, and what share that is of torch.mm's rate on one core at the
job's shapes. Of growth: the same step at each of --tokens, the smallest first, per token.
Written to docs/profiles/<name>.md, or --out.
"""

from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from tyro.conf import Positional

from benchmarks.cases import dense, growth, moe
from benchmarks.harness import shapes
from benchmarks.harness.case import OnCheckpoint, Run, computed_here
from benchmarks.harness.checkpoints import checkpoints
from benchmarks.harness.gemm import rows_per_expert
from benchmarks.harness.generation import ours, prompts_of
from benchmarks.harness.job import trainer
from benchmarks.harness.profiled import page, profiled
from unfreeze.config.parse import Folder

POSITIONAL = True


class Config(OnCheckpoint):
    """What is profiled."""

    threads: Literal[1] = Field(default=1, description="one core")
    job: Annotated[Literal["moe", "dense", "decode", "growth"], Positional] = Field(description="whose step")
    batch: int = Field(default=1, ge=1, description="of decode: rows that are generated at once")
    tokens: tuple[int, ...] = Field(
        default=(65536, 4096), description="of growth: per step, multiples of 512"
    )
    out: Folder = Field(default="", description="the table; default: docs/profiles/<name>.md")


def written(config: Config, run: Run):
    model = {"dense": shapes.qwen("qwen2", shapes.QWEN2_05B), "growth": shapes.kimi(**growth.SIZES)}.get(
        config.job, shapes.kimi()
    )
    lora, length = {"dense": (None, dense.LENGTH), "growth": (growth.LORA, growth.LENGTH)}.get(
        config.job, (moe.LORA, moe.LENGTH)
    )
    steps = {"moe": [moe.DOCUMENTS], "dense": [dense.DOCUMENTS], "decode": [0]}
    found, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with checkpoints(config.checkpoint, model, model) as (folder, _):
            for documents in steps.get(config.job) or [n // length for n in sorted(config.tokens)]:
                tokens, given = (
                    documents * length or config.batch,
                    (computed_here(), lora, "selective", documents),
                )
                run.say(f"{tokens:,} tokens")
                if config.job == "decode":
                    worker, prompts = ours(str(folder)), prompts_of(config.batch, 8, model["vocab_size"])
                    step = lambda: worker.calls["generate"](prompts, 32)  # noqa: B023, E731 - called at once
                else:
                    step = trainer(str(folder), str(folder), *given, length).calls["step"]
                routed = "n_routed_experts" in model
                width = model["moe_intermediate_size" if routed else "intermediate_size"]
                rows = rows_per_expert(tokens, model) if routed else tokens
                found[tokens] = profiled(step, (rows, model["hidden_size"], width), computed_here())
    finally:
        torch.set_num_threads(threads)
    out = Path(config.out or Path(__file__).parents[2] / "docs" / "profiles" / f"{config.job}.md")
    return page(run, config.job, found, out)
