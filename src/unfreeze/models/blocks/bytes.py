"""The bytes that a block needs in training. Each block answers for itself; parallel/plan adds the answers up.

They are counted, not fitted: each term is a tensor of the code that runs (tests/parallel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


class AttentionShape(NamedTuple):
    """Of attention between its projections: H query and G key heads, the width of both and that of values.

    window     tokens that a query sees; None: all before it
    by_blocks  whether it always runs by blocks of queries: softcapped scores, sinks
    """

    heads: int
    key_heads: int
    width: int
    value_width: int
    window: int | None = None
    by_blocks: bool = False


@dataclass(frozen=True)
class Bytes:
    """What a block needs.

    held       bytes per token that forward leaves for backward
    own        bytes per token that backward has at its worst moment beside all that is held then
    expensive  bytes per token of the outputs that recompute = "selective" keeps: of attention and experts
    linear     bytes per token of the outputs that "elementwise" keeps besides: of linear layers
    scratch    bytes of a workspace, whatever the number of tokens
    scratch_per_rank  numbers, in the computation's dtype, that an adapter has in the workspace per unit of
               rank
    adapter_per_rank  bytes per unit of rank of the copies of an expert adapter's factors, and of their
               gradient
    attention  its workspace grows with the longest document, which the plan knows
    """

    held: int = 0
    own: int = 0
    expensive: int = 0
    linear: int = 0
    scratch: int = 0
    scratch_per_rank: int = 0
    adapter_per_rank: int = 0
    attention: AttentionShape | None = None

    @property
    def peak(self) -> int:
        """Bytes per token at the worst moment of backward."""
        return self.held + self.own

    def __add__(self, after: Bytes) -> Bytes:
        """Of this block and one that comes after it in forward, so before it in backward.

        What `after` held is freed when this one's backward begins.
        """
        return Bytes(
            self.held + after.held,
            max(after.own, self.own - after.held),
            self.expensive + after.expensive,
            self.linear + after.linear,
            self.scratch + after.scratch,
            self.scratch_per_rank + after.scratch_per_rank,
            self.adapter_per_rank + after.adapter_per_rank,
            self.attention or after.attention,
        )


class Block(nn.Module):
    """A part of a decoder layer."""

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """What it needs in training, computed in `dtype`.

        On a device of that kind: "cpu" or "cuda". What an adapter adds per unit of rank is left out.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say its bytes, which the plan asks for")
