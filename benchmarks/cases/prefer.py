"""tiny-k2 taught to talk like Yoda by pairs of answers, beside fine-tuning on the chosen ones alone.

`unfreeze dev bench prefer`, about 10 minutes on two cores. The chosen answer of a pair is Yoda's (the demo's
rows), the rejected one what tiny-k2 itself says to the same question. Every side trains adapters of one rank
on the INT4 base, with the same tokens a step and steps; sft sees the chosen answers alone. Measured on the
demo's held-out questions: style and facts kept. Then memory, on a random INT4 model (harness/yoda.py): the
same tokens a step, once with every answer a row of sft, once in pairs.
"""

import tempfile
import time
from pathlib import Path
from typing import Literal

from pydantic import Field

from benchmarks.harness.case import Measured, Run
from benchmarks.harness.shapes import TINY_K2
from benchmarks.harness.yoda import SMALL, answers, found_in, lines, long_rows, pairs_of, small, then, trained
from unfreeze.evaluate.style import compare

Side = Literal["sft", "dpo", "ipo", "kto", "simpo", "orpo", "dpo+nll", "sft+dpo"]


class Config(Measured):
    """What is measured. sft+dpo: then half as many steps of dpo at a fiftieth of the rate."""

    sides: tuple[Side, ...] = Field(
        default=("sft", "dpo", "dpo+nll", "orpo", "sft+dpo"),
        description="kinds of training; dpo+nll: with --preference.nll",
    )
    nll: float = Field(default=5.0, gt=0, description="of dpo+nll; chosen on every other held-out question")
    seed: int = Field(default=0, ge=0, description="of every side")
    beta: float = Field(default=0.0, ge=0, description="of the losses; 0: as `unfreeze prefer` has it")
    steps: int = Field(default=80, ge=2, description="optimizer steps of every side")
    tokens_per_step: int = Field(default=1024, ge=64, description="tokens of a step, of both answers")
    learning_rate: float = Field(default=1e-3, gt=0, description="at its peak, as the demo's")
    rank: int = Field(default=16, ge=1, description="of every adapter")
    questions: int = Field(default=0, ge=0, description="of the demo's rows; 0: all")


def rows(config: Config, run: Run):
    items = lines(TINY_K2 / "held_out.jsonl")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pairs = pairs_of(lines(TINY_K2 / "yoda_train.jsonl")[: config.questions or None], folder)
        before = answers(TINY_K2, items)
        for side in config.sides:
            started = time.perf_counter()
            made = then(config, pairs, folder) if side == "sft+dpo" else trained(side, config, pairs, folder)
            found = compare(before, answers(made, items), items) | found_in(made)
            note = f"style {found['style_before']:.0f} -> {found['style_after']:.1f} %, facts"
            found["note"] = f"{note} {found['facts_before']:.0f} -> {found['facts_after']:.1f} %"
            run.say(f"{side}: {found['note']}")
            settings = {"model": "tiny-k2", "loss": side, **config.model_dump(exclude={"sides", "append"})}
            yield run.row(side, settings, found | {"seconds": time.perf_counter() - started})
        small(folder / "int4")
        asked, first = config.model_copy(update={"steps": 4, "beta": 0.0, "tokens_per_step": 2048}), 0
        for side in dict.fromkeys(["sft", *(side for side in config.sides if "+" not in side)]):
            found = found_in(
                trained(side, asked, long_rows(side, folder), folder / "memory", model=folder / "int4")
            )
            first = first or found["peak_bytes"]
            found |= {"over_sft": found["peak_bytes"] / first}
            found["note"] = f"peak {found['peak_bytes'] / 2**20:.0f} MiB, {found['over_sft']:.3f} x sft's"
            run.say(f"{side}, memory: {found['note']}")
            yield run.row(f"{side}, memory", {**SMALL, "loss": side, "tokens_per_step": 2048}, found)
