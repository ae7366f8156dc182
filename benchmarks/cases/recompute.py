"""Time LoRA on the Qwen3-0.6B shape with the recompute policy a run chooses, beside transformers + peft.

`unfreeze dev bench recompute`, about 6 minutes, 20 GB. A random checkpoint of 596 M parameters; adapters of
rank 16 on every linear layer, 2 documents of 512 tokens a step, clipping, AdamW; bf16, or float32 on a CPU
without bf16 units.
Sides: auto (the choice of a run with the memory that is free now), any of the choices by name, dora (auto
with DoRA), peft (transformers + peft, the same adapters), peft-checkpointing (with gradient checkpointing).
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from benchmarks.harness import shapes
from benchmarks.harness.case import Run, Trained
from benchmarks.harness.training import float64, job
from unfreeze import models
from unfreeze.checkpoint import Manifest
from unfreeze.config.lora import LoraConfig
from unfreeze.core.layout import RESIDENT
from unfreeze.parallel.plan import plan_here

Named = Literal["auto", "nothing", "elementwise", "selective", "layers", "dora", "peft", "peft-checkpointing"]
PEERS = ("peft", "peft-checkpointing")
DOCUMENTS, LENGTH, RANK, DORA = 2, 512, 16, {"rank": 16, "dora": True}


class Config(Trained):
    """Flags of this benchmark."""

    sides: tuple[Named, ...] = Field(
        default=("auto", "selective", *PEERS), min_length=1, description="which sides"
    )


def chosen(model: shapes.Config, config: Config) -> str:
    """The recompute policy that a run of this job would choose on this machine now."""
    manifest = Manifest(path=Path(), config=model, tensors={}, prefix="", files=())
    layout = RESIDENT.but(recompute="auto")
    options = {"dtype": config.computed, "device": config.device, "layout": layout}
    options |= {"tokens": DOCUMENTS * LENGTH, "longest": LENGTH}
    return plan_here(models.shape(model), manifest, LoraConfig(rank=RANK), **options).layout.recompute


def rows(config: Config, run: Run):
    sizes = shapes.QWEN3_06B
    model, small = shapes.qwen("qwen3", sizes), shapes.qwen("qwen3", sizes | shapes.DENSE_CHECKED)
    ours = {name: name for name in config.sides if name not in PEERS}
    ours |= {name: chosen(model, config) for name in ("auto", "dora") if name in ours}
    with job(run, model, small, list(sizes), {"rank": RANK}, DOCUMENTS, LENGTH) as training:
        own = {"dora": float64(run, training.checked, DORA, LENGTH)} if "dora" in ours else {}
        sides = [
            training.ours(name, ours[name], **{"lora": DORA} if name == "dora" else {})
            if name in ours
            else training.theirs(name, "peft", trained="all-linear", rank=RANK, checkpointing=name != "peft")
            for name in config.sides
        ]
        for name, entry in training.in_turn(sides, own).items():
            yield run.row(name, training.settings | {"rank": RANK, "recompute": ours.get(name, "")}, entry)
