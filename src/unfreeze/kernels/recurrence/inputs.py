"""The inputs of a recurrence and its variants, shared by chunks and steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """One row per token T, or per running row S in a step of generation.

    q, k    [T, G, k]
    v       [T, H, v], H a multiple of G
    g       the logarithm of the decay, <= 0, float32: [T, H], or [T, H, k] for one per key channel
    beta    [T, H], the rate of the delta rule; None: SSD
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    def wide(self, rows: Tensor | slice = slice(None)) -> Inputs:
        """These rows in float32 at least (float64 stays: it is the tests' oracle)."""
        q, k, v, g = (x[rows].to(wide(x)) for x in (self.q, self.k, self.v, self.g))
        return Inputs(q, k, v, g, None if self.beta is None else self.beta[rows].to(wide(self.beta)))

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, without a beta that is None."""
        return [x for x in self if x is not None]


class Rule(NamedTuple):
    """scale: factor of q. normalized: q and k are divided by sqrt(Σ x² + 1e-6) first."""

    scale: float = 1.0
    normalized: bool = False

    def prepared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k as the recurrence takes them."""
        return (_unit(q) * self.scale, _unit(k)) if self.normalized else (q * self.scale, k)


def wide(x: Tensor) -> torch.dtype:
    """float32, or x's dtype if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
