"""The largest attention score of every query and head, without its gradient: what qk-clip limits.

T tokens, H query heads, G key heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.attention.form import CAUSAL, Mask
from unfreeze.kernels.attention.layout import DocumentLayout

SCORES = 1 << 22  # scores that exist at once: 16 MiB in float32


@torch.no_grad()
def largest_scores(
    q_THd: Tensor, k_TGd: Tensor, layout: DocumentLayout, scale: float, mask: Mask = CAUSAL
) -> Tensor:
    """Return max over the keys that a query sees of scale · q k, float32 [T, H]; a second product of q and k.

    Scores are computed in float32 for some queries of a document at a time.
    """
    heads, groups = q_THd.shape[1], k_TGd.shape[1]
    largest_TH = torch.empty(q_THd.shape[:2], dtype=torch.float32, device=q_THd.device)
    for begin, end in zip(layout.starts, (*layout.starts[1:], layout.num_tokens), strict=True):
        length = end - begin
        k_G1dN = k_TGd[begin:end].float().permute(1, 2, 0).unsqueeze(1)
        rows = max(1, SCORES // (heads * length))
        place_N = torch.arange(length, device=q_THd.device)
        for first in range(0, length, rows):
            last = min(length, first + rows)
            q_GhBd = q_THd[begin + first : begin + last].float().transpose(0, 1).unflatten(0, (groups, -1))
            hidden_BN = ~mask.allowed(place_N[first:last, None], place_N)
            scores_GhBN = (q_GhBd @ k_G1dN).mul_(scale).masked_fill_(hidden_BN, float("-inf"))
            largest_TH[begin + first : begin + last] = scores_GhBN.amax(-1).flatten(0, 1).T
    return largest_TH
