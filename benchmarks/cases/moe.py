"""Time LoRA on every expert of a Kimi-format INT4 checkpoint, in turn with transformers + peft.

`unfreeze dev bench moe`, about 4 minutes. A random checkpoint of 0.9 GB (harness/shapes.py: SIZES); LoRA rank
8 on the five attention projections and all routed experts, 4 documents of 512 tokens a step, clipping, AdamW;
bf16, or float32 on a CPU without bf16 units.
Sides: unfreeze (recompute selective, the default), unfreeze-nothing (recompute nothing), peft-experts
(experts through target_parameters), peft-checkpointing (the same with gradient checkpointing), peft-attention
(experts frozen). The last two step in turn with unfreeze once the sides before them have ended, because all
at once would not fit 24 GB. torch.mm is the machine's own GEMM rate at the experts' shapes.
"""

from typing import Literal, get_args

from pydantic import Field

from benchmarks.harness import shapes
from benchmarks.harness.case import Run, Trained
from benchmarks.harness.gemm import GEMM, rate_side, share_of_rate
from benchmarks.harness.training import Job, job

Named = Literal["unfreeze", "unfreeze-nothing", "peft-experts", "peft-checkpointing", "peft-attention"]
RANK, DOCUMENTS, LENGTH = 8, 4, 512
LORA = {"rank": RANK, "alpha": 2.0 * RANK, "targets": ("attention", "experts")}
RECOMPUTE = {"unfreeze": "selective", "unfreeze-nothing": "nothing"}
TURNS = (
    ("unfreeze", "unfreeze-nothing", GEMM, "peft-experts"),
    ("unfreeze", "peft-checkpointing"),
    ("unfreeze", "peft-attention"),
)


class Config(Trained):
    """Flags of this benchmark."""

    sides: tuple[Named, ...] = Field(default=get_args(Named), min_length=1, description="which sides")


def side(name: str, job: Job, model: shapes.Config):
    if name == GEMM:
        return rate_side(job, model)
    if name in RECOMPUTE:
        return job.ours(name, RECOMPUTE[name])
    trained = "attention" if name == "peft-attention" else "experts"
    return job.theirs(name, "peft", trained=trained, rank=RANK, checkpointing=name == "peft-checkpointing")


def rows(config: Config, run: Run):
    model, small = shapes.kimi(), shapes.kimi(**shapes.CHECKED)
    with job(run, model, small, shapes.SIZES, LORA, DOCUMENTS, LENGTH) as training:
        chosen = {*config.sides, *([GEMM] if "unfreeze" in config.sides else [])}
        settings = training.settings | {"rank": RANK, "alpha": 2 * RANK, "targets": ["attention", "experts"]}
        for turn, names in enumerate(TURNS, start=1):
            wanted = [name for name in names if name in chosen]
            if turn == 1 or wanted != ["unfreeze"]:
                sides = [side(name, training, model) for name in wanted]
                entries = training.in_turn(sides)
                share_of_rate(entries, sides, RECOMPUTE)
                for name, entry in entries.items():
                    row_settings = settings | {"turn": turn, "recompute": RECOMPUTE.get(name, "")}
                    yield run.row(name, row_settings, entry)
