"""Train every expert of a checkpoint that is larger than the memory allowed: experts come from disk.

`unfreeze dev bench beyond --gigabytes 12 --tokens 2048`, about 10 minutes, one of them to write the
checkpoint: Kimi-format, INT4 experts, 10 of width 8192 in each layer of 0.28 GB, one expert a token. LoRA
rank 4 on every linear layer, documents of 512 tokens, everything recomputed. A side's peak is its whole
resident memory, from its start to its last step. --beside adds the same job with all experts in memory, in
turn: what streaming costs, and whether the losses are the same to the bit. The checkpoint is removed at the
end unless --checkpoint names a folder, where it is found the next time; --clean removes it from there.
"""

from typing import Literal

from pydantic import Field

from benchmarks.harness.case import InTurn, OnCheckpoint, Run, computed_here
from benchmarks.harness.sides import Sides
from benchmarks.harness.streamed import LORA, NAMES, checkpoint, model_of, note, planned_bytes, results, whole
from benchmarks.harness.training import compare

LENGTH, SIZES = 512, {}


class Config(InTurn, OnCheckpoint):
    """What is measured."""

    gigabytes: float = Field(default=12.0, gt=0, description="10^9 bytes of experts, in whole layers")
    tokens: int = Field(default=2048, ge=1, description="tokens per step, a multiple of 512")
    steps: int = Field(default=2, ge=1, description="timed steps of each side; the median counts")
    beside: bool = Field(default=False, description="measure the job with all experts in memory too")
    recompute: Literal["layers", "selective", "elementwise", "nothing"] = Field(
        default="layers", description="what is computed again in backward"
    )
    optimizer_moments: Literal["float32", "int8"] = Field(default="float32", description="AdamW's moments")
    clean: bool = Field(default=False, description="remove the checkpoint from that folder at the end")


def rows(config: Config, run: Run):
    whole(config.tokens, LENGTH)
    model, places = model_of(config.gigabytes, SIZES), ["disk", *(["device"] if config.beside else [])]
    job = {"documents": config.tokens // LENGTH, "length": LENGTH, "recompute": config.recompute}
    job |= {"moments": config.optimizer_moments, "dtype": computed_here()}
    settings = {"shape": {name: size for name, size in model.items() if isinstance(size, int)}}
    settings |= {
        "rank": LORA["rank"],
        "targets": list(LORA["targets"]),
        "dtype": computed_here(),
        "length": LENGTH,
    }
    settings |= {"tokens_per_step": config.tokens, "recompute": config.recompute, "steps": config.steps}
    settings |= {"optimizer_moments": config.optimizer_moments, "warmup": config.warmup}
    with checkpoint(run, model) as folder:
        settings["checkpoint_bytes"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        given = job | {"checkpoint": str(folder)}
        sides = [
            run.side(NAMES[place], "harness.streamed:trainer", experts=place, **given) for place in places
        ]
        plans = [planned_bytes(folder, place, config, LENGTH) for place in places]
        with Sides(sides, run.say) as running:
            running.take_turns("step", warmup=config.warmup, rounds=config.steps)
            found = [results(side, config.tokens) for side in running]
    compare(found)
    for side, plan, entry in zip(sides, plans, found, strict=True):
        apart = [abs(a - b) for a, b in zip(entry["losses"], found[0]["losses"], strict=True)]
        compared = {"losses, against the other side": max(apart)}
        entry["correctness"] = (
            compared if config.beside else {"loss": "nothing to compare with: without --beside"}
        )
        entry["note"] = note(entry, settings["checkpoint_bytes"])
        yield run.row(side.name, settings, entry | {"planned_bytes": plan})
