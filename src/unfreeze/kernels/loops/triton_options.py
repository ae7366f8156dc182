"""The machines that can run Triton kernels, and the kernels' conventions.

Kernels load, widen to float32, compute, and round once at the store. Offsets of rows are int64: T · D passes
2^31 at 300,000 tokens of 7,168. A file with kernels is called triton_cuda.py and is imported only by a
candidate's load(): Triton is missing on many machines.

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1 before Triton is imported), which the tests
use on a CPU. It is right for float32 and integers, but rounds float32 to bf16 towards zero, so bf16 is
refused there.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping

import torch

from unfreeze.kernels import cards
from unfreeze.kernels.choice.op import Candidate, Config, Implementation


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """True if Triton's interpreter replaces a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refuses(device: str, dtype: torch.dtype) -> str:
    """The reason why these kernels cannot run there, for Candidate.refuses."""
    if not installed():
        return "triton is not installed"
    if device == "cpu" and interpreted():
        return "" if dtype == torch.float32 else f"{dtype}: Triton's interpreter is exact in float32 only"
    if device != "cuda":
        return f"it needs cuda, not {device}"
    card = cards.here()
    if card is not None and (why := cards.triton_refuses(card)):
        return why
    return (
        "" if dtype in (torch.float32, torch.bfloat16, torch.float16) else f"{dtype}: it computes in float32"
    )


def candidate(
    load: Callable[[], Implementation],
    because: str = "",
    buckets: tuple[str, ...] = (),
    computes: tuple[str, ...] = (),
    cards: Callable[[tuple[int, int]], bool] | None = None,
    configs: Mapping[str, tuple[Config, ...]] | None = None,
) -> Candidate:
    """Make a candidate of a Triton implementation.

    because: its memory traffic, by which it is predicted to be faster on CUDA ("": not predicted). On a CPU,
    interpreted, it runs only if named: in its own tests.
    buckets: those of the prediction. computes: those it can compute. () is all.
    cards, configs: as in Candidate.
    """
    predicted_on = ("cuda",) if because else ()
    return Candidate(
        load,
        refuses,
        ("cpu",),
        predicted_on,
        because,
        buckets,
        computes,
        cards,
        configs or {},
        waits_on=("cuda",),
    )


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`: the size of a Triton block."""
    return 1 << max(0, value - 1).bit_length()
