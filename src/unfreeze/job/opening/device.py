"""Choose the device, and load a model with progress on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from unfreeze.core.command import Common
from unfreeze.core.garbage import take_up
from unfreeze.job.opening.load import load_as_trained
from unfreeze.job.opening.source import open_as_trained
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    import torch

    from unfreeze.generate.model import Model


# the old name, and the name since torch 2.9
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
SEGMENTS = "expandable_segments:True"


def set_allocator() -> None:
    """Set expandable segments, unless the user configured the allocator or CUDA is already initialised.

    In the latter case it would have no effect; allocator_line reports that.
    """
    torch = sys.modules.get("torch")
    if (torch is None or not torch.cuda.is_initialized()) and not any(
        name in os.environ for name in ALLOCATOR
    ):
        os.environ[ALLOCATOR[0]] = SEGMENTS


def allocator_line() -> tuple[str, bool]:
    """Return (line about the CUDA allocator, True if its segments are expandable); docs/why/trust.md L2."""
    chosen = next((f"{name}={os.environ[name]}" for name in ALLOCATOR if name in os.environ), "")
    if SEGMENTS in chosen:
        return f"allocator: expandable segments ({chosen})", True
    remedy = f"export {ALLOCATOR[0]}={SEGMENTS} before the program starts"
    if not chosen:
        return (
            (
                "allocator: CUDA started before expandable segments could be set, so memory may"
                f" fragment; {remedy}"
            ),
            False,
        )
    return f"allocator: {chosen} has no expandable segments, so memory may fragment; {remedy}", False


def pick_device(name: str, threads: int = 0) -> torch.device:
    """Return the named device ("auto": CUDA if there is one) and set the CPU threads (0: all cores).

    Under torchrun, "cuda" is this process's own GPU.
    Expandable segments are set before CUDA starts, so that its allocator doesn't fragment (docs/why/trust.md
    L2).
    Raises ConfigError for a device that isn't here.
    """
    set_allocator()
    import torch

    from unfreeze.generate.open import device_of
    from unfreeze.parallel.processes.gpus import local_device

    if threads:
        torch.set_num_threads(threads)
    return local_device(device_of(name))


def say(common: Common) -> Callable[[str], None]:
    """Return a function that prints a line to stderr; if quiet, only lines that start with "warning: "."""

    def line_of(line: str) -> None:
        if not common.quiet or line.startswith("warning: "):
            print(line, file=sys.stderr, flush=True)

    return line_of


def load_shown(source: str, dtype: str, device: str, common: Common, base: str = "") -> Model:
    """unfreeze.load with a progress bar for the weights and a line for a download."""
    opened, manifest = open_as_trained(source, say(common), base)
    place = pick_device(device)

    from unfreeze.generate.open import dtype_of
    from unfreeze.kernels import cards
    from unfreeze.kernels.precision import precision, slow

    if unused := cards.passed_over(device, place):
        say(common)(f"warning: on the CPU: {unused.words()}")

    dtype = precision(dtype, place).name
    if why := slow(dtype, place):
        say(common)(f"warning: {why}; faster: --dtype float32")
    take_up()  # all imports are done
    with LoadProgress(quiet=common.quiet) as progress:
        model = load_as_trained(opened, manifest, dtype_of(dtype), place, progress, say(common))
    model.engine.say = say(common)
    return model
