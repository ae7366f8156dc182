"""Parts for attention that are the family's own with another mask, or with norms on q and k."""

from __future__ import annotations

from unfreeze.kernels.attention import CAUSAL, Mask
from unfreeze.models.blocks.attention import Attending, Attention
from unfreeze.models.blocks.mla import MLA, UnrotatedMLA
from unfreeze.models.parts import At, refuse


def full(own: Attending | MLA, at: At) -> Attending | MLA:
    """The same attention without a window; MLA has none."""
    if isinstance(own, Attending):
        _without_blocks(own)
        own.mask = CAUSAL
    elif type(own) not in (MLA, UnrotatedMLA):
        refuse(own, "full", "attention of q, k and v", at)
    return own


def sliding_window(own: Attending, at: At, *, window: int) -> Attending:
    """The same attention to the last `window` tokens."""
    if not isinstance(own, Attending):
        refuse(own, "sliding_window", "attention of q, k and v", at)
    _without_blocks(own)
    own.mask = Mask(window=window)
    return own


def _without_blocks(own: Attending) -> None:
    """Take off the choice of blocks that an earlier part (MoBA) made of it."""
    if own._modules.pop("blocks", None) is not None:
        own.__dict__["blocks"] = None


def qk_norm(own: Attention, at: At) -> Attention:
    """The same attention with an RMSNorm per head on q and k; one that has them stays as it is."""
    if type(own) is not Attention:
        refuse(own, "qk_norm", "grouped-query attention", at)
    if own.q_norm is not None:
        return own
    own.q_norm = at.make.norm(own.head_dim, at.shape.rms_norm_eps)
    own.k_norm = at.make.norm(own.head_dim, at.shape.rms_norm_eps)
    return own
