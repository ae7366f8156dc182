"""Random numbers that are a plain function of what they are for: no state, the same on every machine."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

SEEDS = -(2**63), 2**64 - 1  # smallest and largest seed: 64 bits, signed or not, as torch.manual_seed takes


class Draw(NamedTuple):
    """Key of the random choice of experts in a micro-batch, from (seed, step, micro-batch).

    temperature  shares of experts are score^(1 / temperature); towards 0 the best are chosen
    """

    key: int
    temperature: float


def number(*parts: int) -> int:
    """Return 64 bits that depend on all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def uniform(*parts: int) -> float:
    """Return a number in [0, 1) that depends on all parts: the upper 53 of the 64 bits, over 2^53."""
    return (number(*parts) >> 11) * 2.0**-53
