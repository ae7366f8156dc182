"""Random numbers that are a plain function of what they are for: no state, the same on every machine."""

from __future__ import annotations

import hashlib

SEEDS = -(2**63), 2**64 - 1  # smallest and largest seed: 64 bits, signed or not, as torch.manual_seed takes


def number(*parts: int) -> int:
    """Return 64 bits that depend on all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def uniform(*parts: int) -> float:
    """Return a number in [0, 1) that depends on all parts: the upper 53 of the 64 bits, over 2^53."""
    return (number(*parts) >> 11) * 2.0**-53
