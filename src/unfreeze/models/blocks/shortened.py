"""A layer that reads every `by` tokens of a document as one: depth-wise shortening that stays causal.

    y_t = x_t + carry(layer(p) - p)_t,    p = pool(x)                      (kernels/token_pool)

p has one row per `by` tokens, their mean. Token t receives the layer's change of the last group that is
complete at t: none of its own future, and of its past all that the layer mixes. The residual stream keeps one
row per token. With by = 1 it is the layer itself.

Attention inside sees groups in the place of tokens: a window of W spans W · by tokens. A group turns by the
rotary position of its last token, so distances are those of tokens.

Sources: arXiv:2006.03236 (pooling between layers), arXiv:2110.13711 (shortening that stays causal; there the
tokens are shifted by by - 1 before they are pooled, here the result is).
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar, cast

import torch
from torch import Tensor

from unfreeze.kernels.decode_step.program import Row
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recording import Recording
from unfreeze.models.layer import Layer

Kind = TypeVar("Kind", bound=Layer)


class Shortened(Layer):
    """The first base of a shortened layer's class; the second is that of the layer (`shorten`).

    by: tokens of a group. width: D. state: name of its state in a cache.
    """

    by: int
    width: int
    state: str

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        return run.shorten(self.state, x_TD, self.by, super().forward)

    def record(self, to: Recording, x: Row) -> Row:
        """A step calls forward: in most steps the layer does not run."""
        present = to.present
        return to.called(lambda x_SD: self(x_SD, present.run), x, x.width)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """A token's share of the layer's own, with its group's mean; the output, and its gradient's sum."""
        own, row = super().bytes(dtype, device), self.width * dtype.itemsize
        return Bytes(
            held=_share(own.held + row, self.by) + row,
            own=_share(own.own, self.by) + row,
            expensive=_share(own.expensive, self.by),
            linear=_share(own.linear, self.by),
            scratch=own.scratch,
            scratch_per_rank=own.scratch_per_rank,
            adapter_per_rank=own.adapter_per_rank,
            attention=own.attention,
        )

    def cached(self) -> int:
        """Its blocks count a position per token and have one per group: the difference, below 0."""
        inside = sum(
            block.cached() for block in self.modules() if isinstance(block, Block) and block is not self
        )
        return _share(inside, self.by) - inside

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the open group's sum and of the layer's last change, in float32 at least."""
        return 2 * self.width * torch.promote_types(dtype, torch.float32).itemsize


def shortened(layer: Kind, index: int, by: int, width: int) -> Kind:
    """The same layer, its class derived from Shortened too: parameters keep their names. It is changed."""
    wrapped = cast(Shortened, layer)
    wrapped.__class__ = _derived(type(layer))  # type: ignore[assignment]
    wrapped.by, wrapped.width, wrapped.state = by, width, f"{index}.shorten"
    return layer


@cache
def _derived(kind: type[Layer]) -> type[Layer]:
    return type(f"Shortened{kind.__name__}", (Shortened, kind), {})


def _share(number: int, by: int) -> int:
    return -(-number // by)
