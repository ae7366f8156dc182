"""Train whole models of real shape with random weights on one GPU: tokens/s, MFU, peak memory.

`unfreeze dev bench model`, about a minute for each model, one after the other. Each model's sizes are those
of its published config.json; weights are random and made on the GPU. The step is training's own: packed
documents of 4,096 tokens, forward, backward, clipping, AdamW. Every step trains on the same batch, so the
loss must fall. A model that does not fit gets a row with the plan's arithmetic.
"""

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from benchmarks.harness.case import Measured, Run
from benchmarks.harness.whole import JOBS, Named, Whole, results, sized
from unfreeze.config.parse import Folder
from unfreeze.core.errors import DoesNotFit
from unfreeze.parallel.machine import hardware

SEQUENCE = 4096


class Config(Measured):
    device: Literal["cuda"] = Field(default="cuda", description="a GPU")
    models: tuple[Named, ...] = Field(default=get_args(Named), description="which to run")
    tokens_per_step: tuple[Annotated[int, Field(ge=4096)], ...] = Field(
        default=(65536, 4096), description="in documents of 4,096; one row for each"
    )
    steps: int = Field(default=8, ge=3, le=100, description="timed steps after two that warm up")
    recompute: Literal["layers", "selective", "nothing"] = Field(default="nothing", description="at least")
    traces: Folder = Field(default="", description="folder for torch's profile of one step of each model")


def rows(config: Config, run: Run):
    for name in config.models:
        run.say(f"{name} …")
        job, gpu, whole = JOBS[name], hardware(config.device), None
        for tokens in config.tokens_per_step:
            settings = {"sequence": SEQUENCE, "tokens_per_step": tokens, "sizes": job.config}
            settings |= {"experts": job.experts, "rank": job.rank, "steps": config.steps}
            settings |= {"dtype": "bfloat16", "weights": "random"}
            try:
                plan = sized(job, tokens, config.recompute, gpu, config.device, SEQUENCE)
            except DoesNotFit as error:
                yield run.row(name, settings, not_run=str(error).replace("\n", " "))
                continue
            settings |= {"micro_batches": plan.work.micro_batches, "recompute": plan.layout.recompute}
            trace = Path(config.traces, f"{name}-{tokens}.json.gz") if config.traces else None
            whole = whole or Whole(job, config.device)
            measured = whole.train(plan, config.steps, SEQUENCE, trace)
            if measured["learned"]:
                yield run.row(name, settings, results(job, plan, measured, gpu.name))
            else:
                losses = f"{measured['loss_first']:.3f} to {measured['loss_last']:.3f}"
                yield run.row(name, settings, not_run=f"the loss did not fall on repeated data: {losses}")
        if whole is not None:
            whole.close()
