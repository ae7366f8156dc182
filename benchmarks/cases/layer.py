"""Measure one true Kimi-K2 layer on a GPU, with an eighth of its experts, beside what was predicted.

`unfreeze dev bench layer`, about two minutes. The predictions were written down before there was a GPU. Each
row has the prediction, the time above which it is refuted, the measured time, and the error against float64.
Routing is balanced, then skewed. The figures of a node of eight GPUs are derived from the slice
(harness/kimi_slice.py); no node was measured. The slice is made smaller until it fits the GPU;
predictions are about the whole slice on one H200.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field

from benchmarks.harness.case import Measured, Run, pick
from benchmarks.harness.kimi_slice import KimiSlice, Slice, derive, fitting
from benchmarks.harness.shapes import KIMI_K2
from benchmarks.harness.timing import Timing, timed
from unfreeze.parallel.machine import hardware

# row -> (prediction in words, met up to, refuted above) in ms
PREDICTED = {
    "MoE layer forward": ("12 to 13.5 ms", 13.5, 16.0),
    "MoE layer recompute + backward": ("20 to 22 ms", 22.0, 26.0),
    "attention, shared expert and norms, all passes": ("19 to 20 ms", 20.0, 25.0),
    "one whole layer": ("52 to 56 ms", 56.0, 65.0),
}
WHOLE = Slice(KIMI_K2, experts=48, tokens=8192, sequence=2048, rank=16)


class Config(Measured):
    device: Literal["cuda"] = Field(default="cuda", description="a GPU")
    repeats: Annotated[int, Field(ge=3, le=200)] = Field(default=20, description="timed calls of each row")


def verdict(name: str, ms: float, why: str) -> dict:
    """met, missed (slower than predicted, not refuted) or refuted. why: it does not apply here."""
    words, met, limit = PREDICTED.get(name, ("", 0, 0))
    result = why or ("met" if ms <= met else "missed" if ms <= limit else "refuted")
    return {"predicted": words, "refuted_beyond": limit, "verdict": result} if words else {}


def rows(config: Config, run: Run):
    gpu = hardware(config.device)
    sizes = fitting(WHOLE, gpu)
    why = "" if "H200" in gpu.name else "predicted for an H200"
    why = why if sizes == WHOLE else "smaller slice, not comparable"
    run.say(f"{gpu.name}: {sizes.experts} experts, {sizes.tokens:,} tokens {why}")
    built, times = KimiSlice(sizes, torch.device(config.device)), dict[tuple[str, str], Timing]()
    settings = pick(sizes, "experts", "tokens", "rows", "sequence", "rank")
    for name, routing, works, errors in built.parts():
        timings = [timed(work, built.device, repeats=config.repeats) for work in works]
        times[name, routing] = timing = sum(timings[1:], timings[0])
        results = timing.results() | verdict(name, timing.ms, why) | {"correctness": errors}
        yield run.row(name, settings | {"dtype": "bfloat16", "routing": routing}, results)
    if sizes != WHOLE:
        return (yield run.row("node", settings, not_run="the slice is not whole, so no node is derived"))
    grid = derive({part: timing.ms for part, timing in times.items()})
    yield run.row("node", settings, {"label": "derived from one-GPU slices", "grid": grid})
