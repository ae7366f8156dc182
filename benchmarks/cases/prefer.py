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

from benchmarks.harness import yoda
from benchmarks.harness.case import Measured, Run
from benchmarks.harness.shapes import TINY_K2
from benchmarks.harness.yoda import answers, found_in, lines, trained
from unfreeze.evaluate.style import compare_style

SIDES = ("sft", "dpo", "dpo+nll", "orpo", "sft+dpo")
Side = Literal["sft", "dpo", "ipo", "kto", "simpo", "orpo", "dpo+nll", "sft+dpo"]


class Config(Measured):
    sides: tuple[Side, ...] = Field(default=SIDES, description="dpo+nll: with --preference.nll")
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
        pairs = yoda.pairs_of(lines(TINY_K2 / "yoda_train.jsonl")[: config.questions or None], folder)
        before = answers(TINY_K2, items)
        for side in config.sides:
            started = time.perf_counter()
            made = trained(side, config, pairs, folder)
            found = compare_style(before, answers(made, items), items) | found_in(made)
            found["note"] = yoda.said(found)
            run.say(f"{side}: {found['note']}")
            settings = {"model": "tiny-k2", "loss": side, **config.model_dump(exclude={"sides", "append"})}
            yield run.row(side, settings, found | {"seconds": time.perf_counter() - started})
        for side, found in yoda.memory(config, folder):
            yield run.row(
                f"{side}, memory", {**yoda.SMALL, "loss": side, "tokens_per_step": yoda.TOKENS}, found
            )
