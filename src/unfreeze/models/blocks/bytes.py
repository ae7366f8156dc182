"""Bytes that a block needs in training. Each block counts its own; parallel/plan adds them up.

They are counted, not fitted: each term is a tensor of the code that runs (tests/parallel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from unfreeze.kernels import moba
from unfreeze.kernels.sparse_attention import selected_bytes


class AttentionShape(NamedTuple):
    """Sizes of attention between its projections: H query heads, G key heads, their width and that of values.

    window     tokens that a query sees, if documents longer than that run by blocks of queries; else None
    by_blocks  True if it always runs by blocks of queries: softcapped scores, sinks
    one_call   True if all documents attend in one call of a flash kernel (kernels/packed_attention)
    keys       keys that a query chooses, if documents longer than that run by blocks of queries; else None
    blocks     tokens of a block and blocks that a query sees, if it chooses (blocks/moba.py); else None
    """

    heads: int
    key_heads: int
    width: int
    value_width: int
    window: int | None = None
    by_blocks: bool = False
    one_call: bool = False
    keys: int | None = None
    blocks: tuple[int, int] | None = None

    def chosen_scratch(self, tokens: int, length: int) -> int | None:
        """Bytes of its workspace if documents of `length` choose keys or blocks; None: they do not."""
        widths = self.heads, self.width, self.value_width
        if self.keys is not None and self.keys < length:
            return selected_bytes(*widths, length)
        if self.blocks is None or self.blocks[0] * self.blocks[1] >= length:
            return None
        block, chosen = self.blocks
        sizes = self.heads, self.key_heads, self.width, self.value_width
        return moba.scratch_bytes(sizes, block=block, chosen=chosen, tokens=tokens, length=length)


@dataclass(frozen=True)
class Bytes:
    """Memory needed by a block.

    held       bytes per token that forward leaves for backward
    own        bytes per token that backward adds at its peak to everything held then
    expensive  bytes per token of the outputs that recompute = "selective" keeps: of attention and experts
    linear     bytes per token of the outputs that "elementwise" keeps in addition: of linear layers
    scratch    bytes of a workspace, independent of the number of tokens
    scratch_per_rank  elements, in the computation's dtype, that an adapter takes in the workspace per unit of
               rank
    adapter_per_rank  bytes per unit of rank of the copies of an expert adapter's factors and of their
                      gradient
    attention  its sizes; its workspace grows with the longest document, which the plan knows
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
        """Bytes per token at the peak of backward."""
        return self.held + self.own

    def __add__(self, after: Bytes) -> Bytes:
        """Sum of this block and one that runs after it in forward, so before it in backward.

        Backward has freed what `after` held when it reaches this block.
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
        """Bytes it needs in training when computed in `dtype` on `device` ("cpu" or "cuda").

        What an adapter adds per unit of rank is left out.
        """
        raise NotImplementedError(f"{type(self).__name__} has no bytes(), which the plan needs")

    def cached(self) -> int:
        """Numbers that a position has in its KV cache; 0 unless it is attention."""
        return 0

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a row has in a cache whatever its length: a recurrent state; 0 for most blocks."""
        return 0
