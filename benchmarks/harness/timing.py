"""Time of one piece of work on a device: the median of repeats after a warm-up, with its quartiles.

CUDA events, read after the last repeat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from unfreeze.train.memory import peak_bytes, reset_peak_bytes


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, and the first and third quartile of `repeats`.

    peak_bytes: the most memory in use on the device meanwhile (on a CPU: in the process).
    """

    ms: float
    low_ms: float
    high_ms: float
    repeats: int
    peak_bytes: int

    def __add__(self, other: Timing) -> Timing:
        """The timing of one work after the other. Quartiles add up too, so the spread is not understated."""
        times = (self.ms + other.ms, self.low_ms + other.low_ms, self.high_ms + other.high_ms)
        return Timing(*times, self.repeats, max(self.peak_bytes, other.peak_bytes))

    def results(self) -> dict[str, Any]:
        """The fields of a row of benchmarks/results."""
        return asdict(self)


def timed(work: Callable[[], object], device: torch.device, *, repeats: int, warmup: int = 3) -> Timing:
    """Call `work` warmup + repeats times.

    The queue is never drained between repeats, so a GPU is timed as in a step, not with its idle start.
    """
    for _ in range(warmup):
        work()
    wait(device)
    reset_peak_bytes(device)
    spans = _cuda_spans(work, repeats) if device.type == "cuda" else _host_spans(work, repeats)
    low, middle, high = statistics.quantiles(spans, n=4) if repeats > 1 else spans * 3
    return Timing(middle, low, high, repeats, peak_bytes(device))


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cuda_spans(work: Callable[[], object], repeats: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def _host_spans(work: Callable[[], object], repeats: int) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(repeats):
        work()
        marks.append(time.perf_counter())
    return [1e3 * (after - before) for before, after in pairwise(marks)]
