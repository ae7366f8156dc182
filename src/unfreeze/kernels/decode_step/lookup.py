"""Tables that the products read: weights or factors that each possible scale stands for.

One load of 32 or 64 bytes replaces a multiplication, a rounding and their constants per group. A model's
scales are some hundred different numbers, so their rows stay in the cache.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from unfreeze.quant.mxfp4 import powers_of_two, unpack_e2m1

CODES = np.arange(-8, 8, dtype=np.float32)


@functools.cache
def int4_values(pairs: bool) -> np.ndarray:
    """The 16 weights of an INT4 group for each bf16 scale: bf16(scale · (code - 8)), code 0 to 15.

    [65,536, 16]: bits of bf16 (2 MiB) or float32 (4 MiB).
    """
    scales = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):  # scales that are NaN or infinite
        bits = (scales[:, None] * CODES).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> np.uint32(16)
    if pairs:
        return rounded.astype(np.uint16)
    return (rounded << np.uint32(16)).view(np.float32)


@functools.cache
def mxfp4_values(pairs: bool) -> Tensor:
    """The 16 weights of each power of two, flat: [256 · 16] in bf16 (8 KiB) or float32 (16 KiB)."""
    numbers = unpack_e2m1(torch.arange(16, dtype=torch.uint8))[::2]
    values = (numbers * powers_of_two(torch.arange(256, dtype=torch.uint8))[:, None]).flatten()
    return values if pairs else values.float()


@functools.cache
def powers() -> Tensor:
    """float32 [256]: the factor of each exponent of one byte (quant/mxfp4.py)."""
    return powers_of_two(torch.arange(256, dtype=torch.uint8)).float()


@functools.cache
def float32_of(dtype: torch.dtype) -> Tensor:
    """float32 [65,536], 256 KiB: the number that each 16 bits are in that dtype."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype).float()
