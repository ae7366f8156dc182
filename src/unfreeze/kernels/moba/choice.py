"""The choice of blocks in a Mixture of Block Attention (MoBA), and attention of a step of generation.

A document is cut into blocks of B tokens from its start; token t lies in block b(t) = t // B. Head h of query
t sees C blocks: its own, causally, and the C - 1 earlier ones with the highest score

    score[t, h, j] = gate_q(q[t, h]) · gate_k(keys of block j, head g(h)),      j < b(t)

A query with fewer earlier blocks sees them all. In MoBA the gates are the identity and the mean: q · mean(k).
The choice is per query head, also where heads share keys, and it has no gradient. C counts the own block, as
topk does in the paper and in its reference. Means are rounded to the keys' dtype, scores are in float32.
Source: MoBA, arXiv:2502.13189, 2.2; the authors' moba_naive.py.

T tokens, E complete blocks of all documents, H query heads, G key heads, r width of the gate, d and v widths;
n queries at once. S rows of a cache, N cached positions, M positions that a query sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.attention.by_blocks import SCORE_BYTES
from unfreeze.kernels.compressed.entries import Entries


class Gated(NamedTuple):
    """The gate's view of a pass: of each query, and of each complete block.

    q   [T, H, r]; e [E, G, r], in a step [S, blocks, G, r]
    """

    q_THr: Tensor
    e_EGr: Tensor


def block_scores(q_nHr: Tensor, e_EGr: Tensor) -> Tensor:
    """[n, H, E] in float32 or wider. In a step e is [n, E, G, r]: each query has blocks of its own."""
    wide = torch.promote_types(q_nHr.dtype, torch.float32)
    q_nGJr = q_nHr.to(wide).unflatten(1, (e_EGr.shape[-2], -1))
    if e_EGr.dim() == 4:
        return (q_nGJr @ e_EGr.to(wide).permute(0, 2, 3, 1)).flatten(1, 2)
    s_GnJE = q_nGJr.transpose(0, 1).flatten(1, 2) @ e_EGr.to(wide).permute(1, 2, 0)
    return s_GnJE.unflatten(1, (len(q_nHr), -1)).transpose(0, 1).flatten(1, 2)


@torch.no_grad()
def select(gated: Gated, entries: Entries, chosen: int) -> Tensor:
    """The earlier blocks that each head of each token sees, int32 [T, H, C - 1]; -1 where it has fewer.

    Rows of documents of at most C · B tokens are -1, and nobody reads them: such documents attend in full.
    """
    tokens, heads = gated.q_THr.shape[:2]
    chosen_THC = torch.full((tokens, heads, chosen - 1), -1, dtype=torch.int32, device=gated.q_THr.device)
    for rows, theirs in entries.documents:
        length, count = rows.stop - rows.start, theirs.stop - theirs.start
        if chosen == 1 or length <= chosen * entries.rate:
            continue
        each = max(1, SCORE_BYTES // (4 * heads * count))
        for begin in range(0, length, each):
            end = min(begin + each, length)
            block = slice(rows.start + begin, rows.start + end)
            own_n = torch.arange(begin, end, device=chosen_THC.device) // entries.rate
            chosen_THC[block] = _best(block_scores(gated.q_THr[block], gated.e_EGr[theirs]), own_n, chosen)
    return chosen_THC


@torch.no_grad()
def select_one(gated: Gated, own_S: Tensor, chosen: int) -> Tensor:
    """The same for one query per row of a cache, int32 [S, H, C - 1]; own_S: the block of each query."""
    return _best(block_scores(gated.q_THr, gated.e_EGr), own_S, chosen)


def _best(score_nHE: Tensor, own_n: Tensor, chosen: int) -> Tensor:
    """The places of the best C - 1 scores before the own block; -1 where there are fewer."""
    later_nE = torch.arange(score_nHE.shape[-1], device=own_n.device) >= own_n[:, None]
    score_nHE = score_nHE.masked_fill_(later_nE[:, None], -torch.inf)
    best_nHC = score_nHE.topk(chosen - 1, dim=-1, sorted=False).indices
    return best_nHC.masked_fill(best_nHC >= own_n[:, None, None], -1).to(torch.int32)


def attend_one(
    q_SHd: Tensor,
    k_SNGd: Tensor,
    v_SNGv: Tensor,
    positions_S: Tensor,
    scale: float,
    block: int,
    chosen_SHC: Tensor,
) -> Tensor:
    """One query per row -> [S, H, v]. Only the keys and values of the seen blocks are read."""
    wide = torch.promote_types(q_SHd.dtype, torch.float32)
    rows, heads, cached, groups = len(q_SHd), q_SHd.shape[1], k_SNGd.shape[1], k_SNGd.shape[2]
    own_SH1 = (positions_S // block)[:, None, None].expand(rows, heads, 1)
    blocks_SHC = torch.cat((chosen_SHC.long(), own_SH1), dim=-1)
    place_SHM = (blocks_SHC[..., None] * block + torch.arange(block, device=q_SHd.device)).flatten(2)
    unseen_SHM = (place_SHM < 0) | (place_SHM > positions_S[:, None, None])
    place_SHM = place_SHM.clamp(0, cached - 1)
    row_S11 = torch.arange(rows, device=q_SHd.device)[:, None, None]
    group_H1 = (torch.arange(heads, device=q_SHd.device) * groups // heads)[:, None]
    k_SHMd, v_SHMv = (x[row_S11, place_SHM, group_H1].to(wide) for x in (k_SNGd, v_SNGv))
    c_SHM = (k_SHMd @ q_SHd.to(wide)[..., None])[..., 0].mul_(scale).masked_fill_(unseen_SHM, -torch.inf)
    return (c_SHM.softmax(-1)[..., None, :] @ v_SHMv)[..., 0, :].to(q_SHd.dtype)
