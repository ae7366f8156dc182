"""Time full fine-tuning of the Qwen2-0.5B shape, step by step in turn with transformers.

`unfreeze dev bench dense`, about 4 minutes, 18 GB. A random checkpoint of 494 M parameters; every weight
trains, 2 documents of 512 tokens a step, clipping, AdamW. unfreeze updates bf16 weights through float32
masters and moments (16 bytes per parameter with the gradient); transformers does all in bf16 (8 bytes).
"above state" is the peak minus these bytes, for each side.
Sides: unfreeze, transformers, transformers-liger (with Liger-Kernel, on a GPU only).
"""

from typing import Literal

from pydantic import Field

from benchmarks.harness import shapes
from benchmarks.harness.case import Run, Trained
from benchmarks.harness.peers import liger_refuses
from benchmarks.harness.training import job

DOCUMENTS, LENGTH = 2, 512
Named = Literal["unfreeze", "transformers", "transformers-liger"]


class Config(Trained):
    """Flags of this benchmark."""

    sides: tuple[Named, ...] = Field(
        default=("unfreeze", "transformers", "transformers-liger"), min_length=1, description="which sides"
    )
    recompute: Literal["layers", "selective", "elementwise", "nothing"] = Field(
        default="elementwise", description="recompute policy of unfreeze; elementwise: no GEMM runs twice"
    )


def rows(config: Config, run: Run):
    sizes = shapes.QWEN2_05B
    model, small = shapes.qwen("qwen2", sizes), shapes.qwen("qwen2", sizes | shapes.DENSE_CHECKED)
    refused = liger_refuses(config.device)
    with job(run, model, small, list(sizes), None, DOCUMENTS, LENGTH) as training:
        known = {
            "unfreeze": training.ours("unfreeze", config.recompute),
            "transformers": training.theirs("transformers", "dense", liger=False),
            "transformers-liger": training.theirs("transformers-liger", "dense", liger=True),
        }
        wanted = [name for name in config.sides if name != "transformers-liger" or not refused]
        settings = training.settings | {"recompute": config.recompute}
        for name, entry in training.in_turn([known[name] for name in wanted]).items():
            yield run.row(name, settings, entry)
        for name in config.sides:
            if name not in wanted:
                yield run.row(name, settings, not_run=refused)
