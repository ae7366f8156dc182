"""Time LoRA on a Qwen3.5-shaped hybrid with INT4 experts, in turn with transformers + peft.

`unfreeze dev bench hybrid`, about 6 minutes. A random checkpoint of 1 GB (harness/shapes.py: HYBRID_SIZES),
six of eight layers with a recurrent state; LoRA rank 8 on the projections of both kinds of layers and on all
routed experts, 4 documents of 512 tokens a step, clipping, AdamW; bf16, or float32 on a CPU without bf16
units. transformers reads the same experts expanded to bf16: it has no reader of packed ones in this family.
Sides: unfreeze (recompute selective, the default), unfreeze-nothing, peft, peft-checkpointing.
"""

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from benchmarks.harness import shapes
from benchmarks.harness.case import Run, Trained
from benchmarks.harness.checkpoints import expanded, make
from benchmarks.harness.training import Job, job

Named = Literal["unfreeze", "unfreeze-nothing", "peft", "peft-checkpointing"]
RANK, DOCUMENTS, LENGTH = 8, 4, 512
LORA = {"rank": RANK, "alpha": 2.0 * RANK, "targets": ("attention", "experts")}
RECOMPUTE = {"unfreeze": "selective", "unfreeze-nothing": "nothing"}
TURNS = (("unfreeze", "unfreeze-nothing", "peft"), ("unfreeze", "peft-checkpointing"))


class Config(Trained):
    """Flags of this benchmark."""

    sides: tuple[Named, ...] = Field(default=get_args(Named), min_length=1, description="which sides")


def side(name: str, training: Job):
    if name in RECOMPUTE:
        return training.ours(name, RECOMPUTE[name])
    folders = {field: twin(Path(getattr(training, field))) for field in ("checkpoint", "checked")}
    more = {"checkpointing": name == "peft-checkpointing", **folders}
    return training.theirs(name, "peft", trained="hybrid", rank=RANK, **more)


def twin(folder: Path) -> str:
    """The checkpoint beside `folder` with expanded experts; written if there is none."""
    place = folder.with_name(f"{folder.name}-bf16")
    if not (place / "config.json").is_file():
        config = shapes.hybrid(**(shapes.HYBRID_CHECKED if folder.name == "checked" else {}))
        del config["quantization_config"]
        make(place, config, expanded)
    return str(place)


def rows(config: Config, run: Run):
    model, small = shapes.hybrid(), shapes.hybrid(**shapes.HYBRID_CHECKED)
    with job(run, model, small, shapes.HYBRID_SIZES, LORA, DOCUMENTS, LENGTH) as training:
        settings = training.settings | {"rank": RANK, "alpha": 2 * RANK, "targets": ["attention", "experts"]}
        for turn, names in enumerate(TURNS, start=1):
            wanted = [name for name in names if name in config.sides]
            if turn == 1 or wanted != ["unfreeze"]:
                for name, entry in training.in_turn([side(name, training) for name in wanted]).items():
                    row_settings = settings | {"turn": turn, "recompute": RECOMPUTE.get(name, "")}
                    yield run.row(name, row_settings, entry)
