"""Mixture of Block Attention as a part: the family's own attention with a choice of blocks."""

from __future__ import annotations

from unfreeze.kernels.attention import CAUSAL
from unfreeze.models.blocks.attention import Attending
from unfreeze.models.blocks.moba import LowRankGate, MeanGate, MixtureOfBlocks
from unfreeze.models.parts import At, refuse

NEEDS = "attention of q, k and v, no softcap or sinks"


def moba(own: Attending, at: At, *, block: int, chosen: int, gate: str, rank: int) -> Attending:
    """The same attention to `chosen` blocks. It takes over every parameter; a learned gate adds two."""
    if not isinstance(own, Attending) or own.softcap is not None or own.sinks is not None:
        refuse(own, "moba", NEEDS, at)
    bytes_of = own.bytes(at.make.dtype, "cpu").attention
    assert bytes_of is not None
    heads, groups, width = bytes_of.heads, bytes_of.key_heads, bytes_of.width
    where = {"dtype": at.make.dtype, "device": at.make.device}
    if gate == "mean":
        scores = MeanGate(width)
    else:
        scores = LowRankGate(heads, groups, width, min(rank, width), **where)
    own.mask = CAUSAL
    own.blocks = MixtureOfBlocks(own.layer, heads, groups, block, chosen, scores)
    return own
