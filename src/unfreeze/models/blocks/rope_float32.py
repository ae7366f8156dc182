"""Inverse frequencies in float32, rounded where transformers rounds them: modeling_rope_utils.py of 5.23.

A power of float32 numbers is up to 2^-21 off (the exponent is rounded, then multiplied by ln theta), and
angles grow with the position. So the order of operations is part of what a published model computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Computed:
    """A table of R/2 numbers for the rope type `kind`, with base theta and rotary width R.

    factor    for all types but default
    low, high, context   llama3: the bounds of its ramp and the length they refer to; yarn: the first and last
                         pair of its ramp
    turning   proportional: pairs that rotate
    divisors, long       longrope: a divisor per pair, for short and for long documents
    sign      -1 for the opposite direction
    """

    kind: str
    theta: float
    width: int
    factor: float = 1.0
    low: float = 0.0
    high: float = 0.0
    context: float = 0.0
    turning: int = 0
    divisors: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    sign: float = 1.0

    def numbers(self, long: bool = False) -> Tensor:
        """float32 [R/2] on the host. long: longrope's table for long documents."""
        import torch

        i_P = torch.arange(0, self.width, 2, dtype=torch.float32)
        power_P = self.theta ** (i_P / self.width)
        if self.kind == "longrope":
            divisors_P = torch.tensor(self.long if long else self.divisors, dtype=torch.float32)
            return self.sign * (1.0 / (divisors_P * power_P))
        plain_P = 1.0 / power_P
        if self.kind == "llama3":
            plain_P = self._llama3(plain_P)
        elif self.kind == "yarn":
            ramp_P = (torch.arange(self.width // 2, dtype=torch.float32) - self.low) / (self.high - self.low)
            keep_P = 1 - ramp_P.clamp(0, 1)
            plain_P = 1.0 / (self.factor * power_P) * (1 - keep_P) + plain_P * keep_P
        elif self.kind != "default":
            if self.kind == "proportional":
                plain_P[self.turning :] = 0.0
            plain_P = plain_P / self.factor
        return self.sign * plain_P

    def _llama3(self, plain_P: Tensor) -> Tensor:
        wavelength_P = 2 * math.pi / plain_P
        longest, shortest = self.context / self.low, self.context / self.high
        scaled_P = (plain_P / self.factor).where(wavelength_P > longest, plain_P)
        smooth_P = (self.context / wavelength_P - self.low) / (self.high - self.low)
        between_P = (1 - smooth_P) * scaled_P / self.factor + smooth_P * scaled_P
        return between_P.where(~(wavelength_P < shortest) & ~(wavelength_P > longest), scaled_P)
