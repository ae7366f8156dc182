"""Train whole models of real shape with random weights on one GPU: tokens/s, MFU, peak memory.

`unfreeze dev bench model`, about a minute for each model, one after the other. Each model's sizes are those
of its published config.json; weights are random and made on the GPU. The step is training's own: packed
documents of 4,096 tokens, forward, backward, clipping, AdamW. Every step trains on the same batch, so the
loss must fall. A model that does not fit gets a row with the plan's arithmetic.
"""

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from benchmarks.harness.case import Measured, Run
from benchmarks.harness.shapes import GPT_OSS_20B, LLAMA_31_8B, QWEN3_06B, QWEN3_30B_A3B, QWEN25_7B, qwen
from benchmarks.harness.whole import Job, results, sized, train
from unfreeze.config.parse import Folder
from unfreeze.core.errors import DoesNotFit
from unfreeze.parallel.machine import hardware

QWEN3_30B = qwen("qwen3_moe", QWEN3_30B_A3B, tied=False)
Named = Literal[
    "qwen3-30b-a3b-int4", "qwen3-30b-a3b-bf16", "gpt-oss-20b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-0.6b-full"
]
JOBS = {
    "qwen3-30b-a3b-int4": Job(QWEN3_30B, "int4", 16, 17000),
    "qwen3-30b-a3b-bf16": Job(QWEN3_30B, "bf16", 16, None),
    "gpt-oss-20b": Job(GPT_OSS_20B, "mxfp4", 16, None),
    "llama-3.1-8b": Job(LLAMA_31_8B, "", 16, None),
    "qwen2.5-7b": Job(qwen("qwen2", QWEN25_7B, tied=False), "", 16, 20000),
    "qwen3-0.6b-full": Job(qwen("qwen3", QWEN3_06B), "", None, 55000),
}
SEQUENCE = 4096


class Config(Measured):
    device: Literal["cuda"] = Field(default="cuda", description="a GPU")
    models: tuple[Named, ...] = Field(default=get_args(Named), description="which to run")
    tokens_per_step: int = Field(default=65536, ge=4096, description="in documents of 4,096")
    steps: int = Field(default=8, ge=3, le=100, description="timed steps after two that warm up")
    recompute: Literal["layers", "selective", "nothing"] = Field(default="selective", description="at least")
    traces: Folder = Field(default="", description="folder for torch's profile of one step of each model")


def rows(config: Config, run: Run):
    for name in config.models:
        run.say(f"{name} …")
        job, gpu, settings = (
            JOBS[name],
            hardware(config.device),
            {"sequence": SEQUENCE, "tokens_per_step": config.tokens_per_step},
        )
        settings |= {"sizes": job.config, "experts": job.experts, "rank": job.rank, "steps": config.steps}
        settings |= {"dtype": "bfloat16", "weights": "random"}
        try:
            plan = sized(job, config.tokens_per_step, config.recompute, gpu, config.device, SEQUENCE)
        except DoesNotFit as error:
            yield run.row(name, settings, not_run=str(error).replace("\n", " "))
            continue
        settings |= {"micro_batches": plan.work.micro_batches, "recompute": plan.layout.recompute}
        trace = Path(config.traces, f"{name}.json.gz") if config.traces else None
        measured = train(job, plan, config.steps, config.device, SEQUENCE, trace)
        if measured["learned"]:
            yield run.row(name, settings, results(job, plan, measured, gpu.name))
        else:
            losses = f"{measured['loss_first']:.3f} to {measured['loss_last']:.3f}"
            yield run.row(name, settings, not_run=f"the loss did not fall on repeated data: {losses}")
