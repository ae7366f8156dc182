"""Rows of the projections that make a head's queries and keys: what scales its attention scores.

H heads, G key heads, d head width; of latent attention n without and r with position, v of values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unfreeze.core.errors import ConfigError
from unfreeze.models.blocks.attention import Attention, FusedAttention, ScaledValueAttention
from unfreeze.models.blocks.mla import MLA, UnrotatedMLA
from unfreeze.models.blocks.shortened import Shortened
from unfreeze.models.decoder import Decoder

Factors = Callable[[Tensor], dict[str, Tensor]]
"""Factors [H] of the heads' scores -> projection -> a factor for each of its rows."""


def scalable(model: Decoder) -> dict[int, Factors]:
    """Return layer -> Factors that multiply each head's scores; layers without scores are left out.

    A head with keys of its own: rows of q and k by sqrt(factor). Keys shared by several heads (GQA) stay, and
    rows of q take all of it. Latent attention: the parts without position by sqrt(factor), the rotary part of
    q by all of it, since all heads share its keys (Kimi K2, arXiv:2507.20534, 2.1).
    Raises ConfigError, naming the layer, if q and k are normed, scores are capped, or keys are chosen; and if
    it is shortened, since its largest scores have no row per token.
    """
    return {
        number: _factors(number, layer if isinstance(layer, Shortened) else layer.attention)
        for number, layer in enumerate(model.layers)
        if layer.bytes(torch.float32, "cpu").attention is not None
    }


def _factors(number: int, attention: object) -> Factors:
    known = type(attention) in (Attention, FusedAttention, ScaledValueAttention, MLA, UnrotatedMLA)
    normed = getattr(attention, "q_norm", None) is not None
    if not known or normed or getattr(attention, "softcap", None) is not None:
        why = "norms its queries and keys" if normed else f"is {type(attention).__name__}, or caps its logits"
        raise ConfigError(
            f"muon.qk_clip scales queries and keys, but layer {number + 1} {why}: a scale would not limit it",
            next="leave muon.qk_clip out",
        )
    if isinstance(attention, MLA):
        return _of_latent(attention)
    assert isinstance(attention, Attention | FusedAttention)
    d = attention.head_dim
    if isinstance(attention, FusedAttention):
        heads, groups = attention.heads, attention.key_heads
    else:
        heads, groups = attention.q_proj.out_features // d, attention.k_proj.out_features // d

    def factors(factor_H: Tensor) -> dict[str, Tensor]:
        q = (factor_H.sqrt() if heads == groups else factor_H).repeat_interleave(d)
        k = (factor_H.sqrt() if heads == groups else factor_H.new_ones(groups)).repeat_interleave(d)
        if isinstance(attention, FusedAttention):
            return {"qkv_proj": torch.cat((q, k, factor_H.new_ones(groups * d)))}
        return {"q_proj": q, "k_proj": k} if heads == groups else {"q_proj": q}

    return factors


def _of_latent(attention: MLA) -> Factors:
    n, r, v = attention.nope, attention.rope, attention.value
    last = "q_proj" if attention.q_proj is not None else "q_b_proj"

    def factors(factor_H: Tensor) -> dict[str, Tensor]:
        root_H1, whole_H1 = factor_H.sqrt()[:, None], factor_H[:, None]
        q = torch.cat((root_H1.expand(-1, n), whole_H1.expand(-1, r)), dim=1)
        kv = torch.cat((root_H1.expand(-1, n), torch.ones_like(whole_H1).expand(-1, v)), dim=1)
        return {last: q.flatten(), "kv_b_proj": kv.flatten()}

    return factors
