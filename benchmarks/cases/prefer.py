"""Teach tiny-k2 to talk like Yoda from pairs of answers, beside fine-tuning on the chosen answers alone.

`unfreeze dev bench prefer`, about 10 minutes on two cores. The chosen answer of a pair is Yoda's (the demo's
rows), the rejected one is tiny-k2's own answer. Every side trains adapters of the same rank on the INT4
base, with the same tokens per step and number of steps; sft sees the chosen answers alone. Style and facts
are measured on the demo's held-out questions. Memory is measured on a random INT4 model (harness/yoda.py) at
the same tokens per step: once with every answer as a row of sft, once in pairs.
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
    nll: float = Field(
        default=5.0, gt=0, description="weight in dpo+nll; tuned on every other held-out question"
    )
    seed: int = Field(default=0, ge=0, description="seed of every side")
    beta: float = Field(
        default=0.0, ge=0, description="beta of the losses; 0: the default of `unfreeze prefer`"
    )
    steps: int = Field(default=80, ge=2, description="optimizer steps of every side")
    tokens_per_step: int = Field(default=1024, ge=64, description="tokens per step, both answers counted")
    learning_rate: float = Field(default=1e-3, gt=0, description="peak of the schedule, as in the demo")
    rank: int = Field(default=16, ge=1, description="rank of every adapter")
    questions: int = Field(default=0, ge=0, description="how many of the demo's rows; 0: all")


def rows(config: Config, run: Run):
    items = lines(TINY_K2 / "held_out.jsonl")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pairs = yoda.pairs_of(lines(TINY_K2 / "yoda_train.jsonl")[: config.questions or None], folder)
        before = answers(TINY_K2, items)
        for side in config.sides:
            started = time.perf_counter()
            out = trained(side, config, pairs, folder)
            results = compare_style(before, answers(out, items), items) | found_in(out)
            results["note"] = yoda.said(results)
            run.say(f"{side}: {results['note']}")
            settings = {"model": "tiny-k2", "loss": side, **config.model_dump(exclude={"sides", "append"})}
            yield run.row(side, settings, results | {"seconds": time.perf_counter() - started})
        for side, results in yoda.memory(config, folder):
            yield run.row(
                f"{side}, memory", {**yoda.SMALL, "loss": side, "tokens_per_step": yoda.TOKENS}, results
            )
