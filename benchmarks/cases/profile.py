"""Profile one step op by op, beside the GEMM rate of a core.

`unfreeze dev bench profile moe|dense|decode|growth|recompute`, 1 to 4 minutes. One step of our side of that
benchmark (decode: 32 tokens; growth: at each of --tokens) under torch's profiler, on one core, so that times
add up. Numba loops have their names. GEMMs come with their FLOP and share of torch.mm's rate at those shapes.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from tyro.conf import Positional

from benchmarks.cases import dense, growth, moe, recompute
from benchmarks.harness import shapes
from benchmarks.harness.case import OnCheckpoint, Run, computed_here
from benchmarks.harness.checkpoints import checkpoints
from benchmarks.harness.generation import generated, ours, prompts_of
from benchmarks.harness.job import trainer
from benchmarks.harness.profiled import mlp, one_thread, page, profiled
from benchmarks.harness.training import whole
from unfreeze.config.parse import Folder

POSITIONAL = True
Job = Literal["moe", "dense", "decode", "growth", "recompute"]


class Config(OnCheckpoint):
    threads: Literal[1] = Field(default=1, description="one core")
    job: Annotated[Job, Positional] = Field(description="benchmark")
    batch: int = Field(default=1, ge=1, description="decode: rows generated at once")
    tokens: tuple[int, ...] = Field(default=(65536, 4096), description="growth: tokens per step, n x 512")
    out: Folder = Field(default="", description="the table; default: docs/measured/profiles/<name>.md")


def written(config: Config, run: Run):
    profiles, model, kept = {}, shapes.kimi(), "selective"
    lora, length, steps = moe.LORA, moe.LENGTH, [moe.DOCUMENTS if config.job == "moe" else 0]
    if config.job == "dense":
        model, lora = shapes.qwen("qwen2", shapes.QWEN2_05B), None
        length, steps = dense.LENGTH, [dense.DOCUMENTS]
    if config.job == "recompute":
        model, lora, kept = shapes.qwen("qwen3", shapes.QWEN3_06B), {"rank": recompute.RANK}, "nothing"
        length, steps = recompute.LENGTH, [recompute.DOCUMENTS]
    if config.job == "growth":
        whole(config.tokens, growth.LENGTH)
        model, lora, length = shapes.kimi(**growth.SIZES), growth.LORA, growth.LENGTH
        steps = [tokens // length for tokens in sorted(config.tokens)]
    with one_thread(), checkpoints(config.checkpoint, model, model) as (folder, _):
        for documents in steps:
            run.say(f"{(tokens := documents * length or config.batch):,} tokens")
            if config.job == "decode":
                worker, prompts = ours(str(folder)), prompts_of(config.batch, 8, model["vocab_size"])
                step = lambda: generated(worker, prompts, 32)  # noqa: B023, E731 - called at once
            else:
                options = computed_here(), lora, kept, documents, length
                step = trainer(str(folder), str(folder), *options).calls["step"]
            profiles[tokens] = profiled(step, mlp(model, tokens), computed_here())
    out = config.out or Path(__file__).parents[2] / f"docs/measured/profiles/{config.job}.md"
    return page(run, config.job, profiles, Path(out))
