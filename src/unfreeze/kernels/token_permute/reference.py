"""Rows in expert order in plain torch: the oracle; it runs if no faster candidate is proven.

No function waits for the device. T tokens, K experts per token, E experts, n = T K rows (a token at one
expert), D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.loops.rows import slabs

# bytes for each function: for 65,536 tokens of 8 rows of 7,168 all rows at once would be 15 GB in `combine`
SLAB_BYTES = 1 << 26


def sort(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(slot_n int64, row_of_slot int64 [T K], offsets_E int32).

    Row r is slot slot_n[r] = t K + k, and expert e's rows stop at offsets_E[e]. Stable: within an expert the
    tokens stay in order. Ids outside 0 … E-1 are not checked (that would wait for the device).
    """
    ids = ids_TK.reshape(-1)
    if num_experts <= 1 << 15:
        # a radix sort passes over the keys once per byte or so: two bytes instead of eight
        ids = ids.to(torch.int16)
    sorted_ids, slot_n = ids.sort(stable=True)
    row_of_slot = torch.empty_like(slot_n).scatter_(
        0, slot_n, torch.arange(slot_n.numel(), device=ids.device)
    )
    every = torch.arange(num_experts, dtype=ids.dtype, device=ids.device)
    return slot_n, row_of_slot, torch.searchsorted(sorted_ids, every, right=True, out_int32=True)


def gather(source_TD: Tensor, slot_n: Tensor, per_token: int, out: Tensor) -> None:
    """out[r, :D] = source[slot_n[r] // K]. out may be wider than D; the other columns are unchanged."""
    width = source_TD.shape[1]
    for rows in slabs(slot_n.numel(), width * source_TD.itemsize, SLAB_BYTES):
        token_n = torch.div(slot_n[rows], per_token, rounding_mode="floor")
        out[rows, :width] = source_TD.index_select(0, token_n)


def combine(rows_nD: Tensor, row_of_slot: Tensor, weight_n: Tensor | None, out_TD: Tensor) -> None:
    """out[t] += Σ_k weight[r] · rows[r], r the row of slot t K + k.

    Summed in float32 in the order of k (weight None: ones). No atomics: bit-identical at every run. out
    float32, or float64 for float64.
    """
    tokens, width = out_TD.shape
    per_token = row_of_slot.numel() // max(1, tokens)
    # float32 rows take twice the memory of bf16, so only one slab of tokens is widened at a time. A token's
    # sum is the same in any slab.
    for some in slabs(tokens, per_token * width * out_TD.itemsize, SLAB_BYTES):
        out = out_TD[some]
        row_n = row_of_slot[some.start * per_token : some.stop * per_token]
        if weight_n is None:  # no row is widened in memory: 14 bytes a number of bf16, not 22
            for row_s in row_n.view(len(out), per_token).unbind(1):
                out += rows_nD.index_select(0, row_s)
            continue
        by_slot = rows_nD.index_select(0, row_n).to(out.dtype)
        by_slot.mul_(weight_n.to(out.dtype)[row_n, None])
        out.add_(by_slot.view(len(out), per_token, width).sum(dim=1))


def combine_backward(
    dy_TD: Tensor,
    rows_nD: Tensor,
    slot_n: Tensor,
    per_token: int,
    weight_n: Tensor,
    drows_nD: Tensor,
    dweight_n: Tensor,
) -> None:
    """drows[r] = weight[r] · dy[token of r]; dweight[r] = <dy[token of r], rows[r]>, in float32."""
    wide = torch.promote_types(dy_TD.dtype, torch.float32)
    token_n = torch.div(slot_n, per_token, rounding_mode="floor")
    for rows in slabs(slot_n.numel(), dy_TD.shape[1] * wide.itemsize, SLAB_BYTES):  # as in `combine`
        dy_sD = dy_TD.index_select(0, token_n[rows]).to(wide)
        dweight_n[rows] = (dy_sD * rows_nD[rows]).sum(-1)
        drows_nD[rows] = dy_sD.mul_(weight_n[rows, None].to(wide))
