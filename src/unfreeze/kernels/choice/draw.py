"""Random numbers for the cases of an op, drawn on the device that computes with them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def normal(device: torch.device, generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal float32 numbers, as `drawn`."""
    return drawn(device, generator, functools.partial(torch.randn, shape))


def uniform(device: torch.device, generator: torch.Generator, *shape: int) -> Tensor:
    """Float32 numbers in [0, 1), as `drawn`."""
    return drawn(device, generator, functools.partial(torch.rand, shape))


def drawn(device: torch.device, generator: torch.Generator, draw: Callable[..., Tensor]) -> Tensor:
    """draw(device=..., generator=...), on `device`.

    generator: on the host. A GPU gets its own, seeded by it: on the host 352 million numbers would take 8 s
    of a core, for each of a cell's five draws. meta: no numbers.
    """
    if device.type == "cuda":
        seed = int(torch.randint(2**31, (1,), generator=generator))
        generator = torch.Generator(device).manual_seed(seed)
    return draw(device=device, generator=None if device.type == "meta" else generator)
