"""Train every expert of a checkpoint that is larger than the memory allowed: experts come from disk.

`unfreeze dev bench beyond --gigabytes 12 --tokens 2048`, about 10 minutes, one of them to write the
checkpoint: Kimi-format, INT4 experts, 10 of width 8192 in each layer of 0.28 GB, one expert a token. LoRA
rank 4 on every linear layer, documents of 512 tokens, every layer recomputed. A side's peak is its whole
resident memory, from its start to its last step. --beside adds the same job with all experts in memory, in
turn; it shows the cost of streaming and checks that losses are bit-identical. The checkpoint is removed at
the end unless --checkpoint names a folder, which the next run reuses; --clean removes it from there.
"""

from typing import Literal

from pydantic import Field

from benchmarks.harness import streamed
from benchmarks.harness.case import InTurn, OnCheckpoint, Run, computed_here, pick
from benchmarks.harness.sides import Sides
from benchmarks.harness.streamed import LORA, NAMES, checkpoint, model_of
from benchmarks.harness.training import compare, whole

LENGTH, SIZES = 512, {}
ALONE = {"loss": "nothing to compare with: without --beside"}


class Config(InTurn, OnCheckpoint):
    """Flags of this benchmark."""

    gigabytes: float = Field(default=12.0, gt=0, description="10^9 bytes of experts, in whole layers")
    tokens: int = Field(default=2048, ge=1, description="tokens per step, a multiple of 512")
    steps: int = Field(default=2, ge=1, description="timed steps of each side; the median counts")
    beside: bool = Field(default=False, description="measure the job with all experts in memory too")
    recompute: Literal["layers", "selective", "elementwise", "nothing"] = Field(
        default="layers", description="recompute policy in backward"
    )
    optimizer_moments: Literal["float32", "int8"] = Field(default="float32", description="AdamW's moments")
    clean: bool = Field(default=False, description="remove the checkpoint from that folder at the end")


def rows(config: Config, run: Run):
    whole([config.tokens], LENGTH)
    model, places = model_of(config.gigabytes, SIZES), ["disk", *(["device"] if config.beside else [])]
    job = {"documents": config.tokens // LENGTH, "length": LENGTH, "recompute": config.recompute}
    job |= {"moments": config.optimizer_moments, "dtype": computed_here()}
    settings = {"shape": {name: size for name, size in model.items() if isinstance(size, int)}}
    settings |= {"rank": LORA["rank"], "targets": list(LORA["targets"]), "dtype": computed_here()}
    settings |= {"length": LENGTH, "tokens_per_step": config.tokens}
    settings |= pick(config, "recompute", "optimizer_moments", "steps", "warmup")
    with checkpoint(run, model) as folder:
        settings["checkpoint_bytes"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        job |= {"checkpoint": str(folder)}
        sides = [run.side(NAMES[place], "harness.streamed:trainer", experts=place, **job) for place in places]
        plans = [streamed.planned_bytes(folder, place, config, LENGTH) for place in places]
        with Sides(sides, run.say) as running:
            running.take_turns("step", warmup=config.warmup, rounds=config.steps)
            entries = [streamed.results(side, config.tokens) for side in running]
    compare(entries)
    for side, plan, entry in zip(sides, plans, entries, strict=True):
        entry["correctness"] = streamed.losses_apart(entry, entries[0]) if config.beside else ALONE
        entry["note"] = streamed.note(entry, settings["checkpoint_bytes"])
        yield run.row(side.name, settings, entry | {"planned_bytes": plan})
