"""Causal attention over packed documents by an explicit [T, T] mask.

The oracle: quadratic in T, for tests and small inputs. T tokens, H query heads, G key/value heads (G divides
H), d width of q and k, v width of values.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_mask(starts: Tensor, num_tokens: int) -> Tensor:
    """allowed[t, s] = (s <= t) and s, t in the same document. bool [T, T]."""
    begins_T = torch.zeros(num_tokens, dtype=torch.int64)
    begins_T[starts] = 1
    document_T = begins_T.cumsum(0)
    return torch.tril(document_T[:, None] == document_T[None, :])


def reference_attention(q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, starts: Tensor, scale: float) -> Tensor:
    """o[t, h] = Σ_s softmax_s(scale · q[t, h]·k[s, g]) v[s, g], g = h·G/H, s <= t, same document.

    Softmax in at least float32.
    """
    compute = torch.promote_types(q_THd.dtype, torch.float32)
    repeat = q_THd.shape[1] // k_TGd.shape[1]
    k_THd = k_TGd.to(compute).repeat_interleave(repeat, dim=1)
    v_THv = v_TGv.to(compute).repeat_interleave(repeat, dim=1)
    score_HTT = scale * torch.einsum("thd,shd->hts", q_THd.to(compute), k_THd)
    mask_TT = document_mask(starts, q_THd.shape[0]).to(q_THd.device)
    weight_HTT = score_HTT.masked_fill(~mask_TT, -torch.inf).softmax(dim=-1)
    return torch.einsum("hts,shv->thv", weight_HTT, v_THv).to(q_THd.dtype)
