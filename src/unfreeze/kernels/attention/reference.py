"""Causal attention over packed documents by an explicit [T, T] mask.

The oracle: quadratic in T, for tests and small inputs. T tokens, H query heads, G key/value heads (G divides
H), d width of q and k, v width of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.attention.form import CAUSAL, Mask


def document_mask(starts: Tensor, num_tokens: int, mask: Mask = CAUSAL) -> Tensor:
    """allowed[t, s]: s and t are in the same document, and `mask` lets t see s. bool [T, T]."""
    begins_T = torch.zeros(num_tokens, dtype=torch.int64)
    begins_T[starts] = 1
    document_T = begins_T.cumsum(0)
    position_T = torch.arange(num_tokens) - torch.as_tensor(starts)[document_T - 1]
    same = document_T[:, None] == document_T[None, :]
    return same & mask.allowed(position_T[:, None], position_T[None, :])


def attention_map(
    q_THd: Tensor,
    k_TGd: Tensor,
    starts: Tensor,
    scale: float,
    *,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """P[h, t, s] = softmax_s(scale · q[t, h]·k[s, g]), g = h·G/H, s <= t, same document -> [H, T, T].

    Softmax in at least float32. `mask`, `softcap` and `sinks_H` as in packed_attention: a sink is one more
    score, whose share of the softmax is dropped. Attention computes this map but never holds it: o = P v.
    """
    compute = torch.promote_types(q_THd.dtype, torch.float32)
    k_THd = k_TGd.to(compute).repeat_interleave(q_THd.shape[1] // k_TGd.shape[1], dim=1)
    score_HTT = scale * torch.einsum("thd,shd->hts", q_THd.to(compute), k_THd)
    if softcap is not None:
        score_HTT = softcap * torch.tanh(score_HTT / softcap)
    mask_TT = document_mask(starts, q_THd.shape[0], mask).to(q_THd.device)
    score_HTT = score_HTT.masked_fill(~mask_TT, -torch.inf)
    if sinks_H is not None:
        sink_HT1 = sinks_H.to(compute)[:, None, None].expand(-1, q_THd.shape[0], 1)
        score_HTT = torch.cat((score_HTT, sink_HT1), dim=-1)
    return score_HTT.softmax(dim=-1)[..., : q_THd.shape[0]]


def reference_attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    starts: Tensor,
    scale: float,
    *,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """o[t, h] = Σ_s P[h, t, s] v[s, g], P as in attention_map, g = h·G/H."""
    weight_HTT = attention_map(q_THd, k_TGd, starts, scale, mask=mask, softcap=softcap, sinks_H=sinks_H)
    v_THv = v_TGv.to(weight_HTT.dtype).repeat_interleave(q_THd.shape[1] // v_TGv.shape[1], dim=1)
    return torch.einsum("hts,shv->thv", weight_HTT, v_THv).to(q_THd.dtype)
