"""The bytes that a block needs in training. Each block answers for itself; parallel/plan adds the answers up.

The factors are fitted to what torch allocated, over families and dtypes: within 15 %
(tests/parallel/test_plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Bytes:
    """What a block needs.

    peak       bytes per token at the worst moment of its backward
    expensive  bytes per token of the outputs that recompute = "selective" keeps: of attention and experts
    linear     bytes per token of the outputs that "elementwise" keeps besides: of linear layers
    scratch    bytes of a workspace, whatever the number of tokens
    scratch_per_rank  numbers, in the computation's dtype, that an adapter has in the workspace per unit of
               rank
    """

    peak: int = 0
    expensive: int = 0
    linear: int = 0
    scratch: int = 0
    scratch_per_rank: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.peak + other.peak,
            self.expensive + other.expensive,
            self.linear + other.linear,
            self.scratch + other.scratch,
            self.scratch_per_rank + other.scratch_per_rank,
        )


class Block(nn.Module):
    """A part of a decoder layer."""

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """What it needs in training without adapters, computed in `dtype`.

        On a device of that kind: "cpu" or "cuda".
        """
        raise NotImplementedError(f"{type(self).__name__} does not say its bytes, which the plan asks for")


def total(blocks: Iterable[Block | None], dtype: torch.dtype, device: str) -> Bytes:
    """The sum over those of `blocks` that are there."""
    return sum((block.bytes(dtype, device) for block in blocks if block is not None), Bytes())
