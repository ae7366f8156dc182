"""Shortening: a layer that reads several tokens as one."""

from __future__ import annotations

from unfreeze.models.blocks.compressed import CompressedAttention
from unfreeze.models.blocks.shortened import Shortened, shortened
from unfreeze.models.blocks.sparse import SparseMLA
from unfreeze.models.layer import Layer
from unfreeze.models.parts import At, refuse


def shorten(own: Layer, at: At, *, by: int) -> Layer:
    """The same layer on the means of every `by` tokens.

    Attention that chooses its keys itself by windows or an indexer is refused: its caches count tokens.
    """
    if at.shape.streams > 1 or isinstance(own, Shortened):
        refuse(own, "shorten", "a layer with one residual that is not shortened", at)
    for part in own.modules():
        if isinstance(part, CompressedAttention | SparseMLA):
            refuse(part, "shorten", "a layer without an indexer", at)
    return shortened(own, at.index, by, at.shape.hidden_size)
