"""The 16 weights of an INT4 group for each bf16 scale: bf16(scale · (code - 8)), code 0 to 15.

One load of 32 or 64 bytes replaces a multiplication, a rounding and their constants per group. A model's
scales are some hundred different numbers, so their rows stay in the cache.
"""

from __future__ import annotations

import functools

import numpy as np

CODES = np.arange(-8, 8, dtype=np.float32)


@functools.cache
def int4_values(pairs: bool) -> np.ndarray:
    """[65,536, 16]: bits of bf16 (2 MiB) or float32 (4 MiB)."""
    scales = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):  # scales that are NaN or infinite
        bits = (scales[:, None] * CODES).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> np.uint32(16)
    if pairs:
        return rounded.astype(np.uint16)
    return (rounded << np.uint32(16)).view(np.float32)
