"""Values of new experts and routers: copies, copies with noise, copies with channels drawn anew.

Every draw has its own seed, made of the run's seed and the tensor's place, so that a checkpoint has the same
bytes however its files are cut and wherever it was interrupted.

D model width, I width of the MLP (its channels).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Change:
    """Difference of an expert from the MLP that it is a copy of; by default none.

    noise  each weight gets N(0, (noise · rms(W))²)
    drop   share of the I channels whose rows of gate and up and whose column of down are drawn anew from
           N(mean, std²) of the replaced numbers (Drop-Upcycling, arXiv:2502.19261, which takes 0.5)
    """

    seed: int = 0
    noise: float = 0.0
    drop: float = 0.0

    @property
    def none(self) -> bool:
        return not self.noise and not self.drop

    def applied(self, weight: Tensor, expert: str, matrix: str) -> Tensor:
        """One matrix [I, D] (gate, up) or [D, I] (down) of an expert, in the dtype it has.

        expert: its place, such as "3.5", layer and number; the channels drawn anew are the same in its three
        matrices. matrix: "gate", "up" or "down".
        """
        if self.none:
            return weight
        changed = weight.float().clone()
        rows = changed.mT if matrix == "down" else changed  # [I, D], a view
        generator = generator_of(self.seed, expert, matrix)
        count = round(self.drop * len(rows))
        if count:
            order = torch.randperm(len(rows), generator=generator_of(self.seed, expert, "channels"))
            channels = order[:count].sort().values
            replaced = rows[channels]
            drawn = torch.randn(replaced.shape, generator=generator)
            rows[channels] = replaced.mean() + replaced.std(correction=0) * drawn
        if self.noise:
            size = self.noise * weight.float().square().mean().sqrt()
            changed += size * torch.randn(changed.shape, generator=generator)
        return changed.to(weight.dtype)


def generator_of(seed: int, *place: object) -> torch.Generator:
    """A generator for one tensor."""
    text = ":".join(map(str, (seed, *place)))
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))


def router_rows(experts: int, width: int, std: float, seed: int, layer: int) -> Tensor:
    """A router [experts, width] ~ N(0, std²), float32.

    Zeros would tie all experts: every token would go to the same K, and the others would never learn.
    """
    return std * torch.randn(experts, width, generator=generator_of(seed, layer, "router"))


def beside_parent(row: Tensor, seed: int, layer: int, expert: int) -> Tensor:
    """A router's row [D] for a copy of an expert: (row + n) / √2 with n ~ N(0, rms(row)²).

    The new expert is asked for similar tokens as its parent, and not for the same ones.
    """
    row = row.float()
    size = row.square().mean().sqrt()
    drawn = torch.randn(row.shape, generator=generator_of(seed, layer, expert, "row"))
    return (row + size * drawn) / 2**0.5
