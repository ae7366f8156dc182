"""The device a command runs on, and a model opened with progress on stderr.

What every recipe that loads weights begins with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from unfreeze.core.command import Common
from unfreeze.core.garbage import take_up
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    import torch

    from unfreeze.generate.model import Model


# the name of old, and the one torch has had since 2.9
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
SEGMENTS = "expandable_segments:True"


def set_allocator() -> None:
    """Set expandable segments, unless the user chose, or CUDA runs already.

    Then it would change nothing, and allocator_line says so.
    """
    torch = sys.modules.get("torch")
    if (torch is None or not torch.cuda.is_initialized()) and not any(
        name in os.environ for name in ALLOCATOR
    ):
        os.environ[ALLOCATOR[0]] = SEGMENTS


def allocator_line() -> tuple[str, bool]:
    """(what the plan says of the CUDA allocator, whether segments can grow). docs/why/trust.md L2."""
    chosen = next((f"{name}={os.environ[name]}" for name in ALLOCATOR if name in os.environ), "")
    if SEGMENTS in chosen:
        return f"allocator: expandable segments ({chosen})", True
    remedy = f"export {ALLOCATOR[0]}={SEGMENTS} before the program starts"
    if not chosen:
        return (
            (
                "allocator: CUDA had started before expandable segments could be set, so memory may"
                f" fragment; {remedy}"
            ),
            False,
        )
    return f"allocator: {chosen} has no expandable segments, so memory may fragment; {remedy}", False


def pick_device(name: str, threads: int = 0) -> torch.device:
    """The device of a name; "auto": CUDA if there is one. `threads` CPU threads from here on, 0: all cores.

    Under torchrun "cuda" is this process's own GPU.
    Expandable segments are set before CUDA starts, so that its allocator doesn't fragment (docs/why/trust.md
    L2).
    Raises ConfigError for a device that isn't here.
    """
    set_allocator()
    import torch

    from unfreeze.generate.open import device_of
    from unfreeze.parallel.processes.collectives import local_device

    if threads:
        torch.set_num_threads(threads)
    return local_device(device_of(name))


def say(common: Common) -> Callable[[str], None]:
    """One plain line on stderr, of a download say; when quiet only those that begin with "warning: "."""

    def line_of(line: str) -> None:
        if not common.quiet or line.startswith("warning: "):
            print(line, file=sys.stderr, flush=True)

    return line_of


def load_shown(source: str, dtype: str, device: str, common: Common, base: str = "") -> Model:
    """unfreeze.load with a bar for the weights and a line for a download."""
    from unfreeze.generate.source import open_source

    found, manifest = open_source(source, say(common), base)
    place = pick_device(device)

    from unfreeze.generate.model import load_opened
    from unfreeze.generate.open import dtype_of
    from unfreeze.kernels.precision import precision, slow

    dtype = precision(dtype, place).name
    if why := slow(dtype, place):
        say(common)(f"warning: {why}; faster: --dtype float32")
    take_up()  # everything is imported
    with LoadProgress(quiet=common.quiet) as progress:
        return load_opened(found, manifest, dtype_of(dtype), place, progress, say(common))
