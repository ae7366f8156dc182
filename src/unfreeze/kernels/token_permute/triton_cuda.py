"""Rows in expert order on CUDA. Functions as in reference.py; no host synchronisation, no atomics.

A counting sort: blocks of slots count their experts. A cumulative sum over (expert, block) gives the start of
each block's rows of each expert. Each slot goes to that place plus its rank among the equal ids before it in
its block.
"""

# A launch takes numbers for constexpr parameters, and num_warps, which the kernel's signature doesn't declare
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.loops.triton_options import power_of_two

SLOTS = 128  # per program of the sort: its ranks are a 128 x 128 comparison
EXPERTS = 64  # compared with a block's slots at a time


@triton.jit
def _count(ids, counts, slots, experts, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    """counts[e, block] = number of times that e occurs in the block's slots."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    slot = block * SLOTS + tl.arange(0, SLOTS)
    here = tl.load(ids + slot, mask=slot < slots, other=-1).to(tl.int32)
    for begin in range(0, experts, EXPERTS):
        expert = begin + tl.arange(0, EXPERTS)
        count = tl.sum((here[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(counts + expert * blocks + block, count, mask=expert < experts)


@triton.jit
def _place(ids, ends, counts, slot_n, row_of_slot, slots, SLOTS: tl.constexpr):
    """ends: the inclusive cumulative sum of counts, so a block's rows of e start at ends - counts."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, SLOTS)
    slot = block * SLOTS + lane
    inside = slot < slots
    here = tl.load(ids + slot, mask=inside, other=-1).to(tl.int32)
    before = (here[:, None] == here[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(before.to(tl.int32), axis=1)
    cell = here * blocks + block
    row = tl.load(ends + cell, mask=inside, other=0) - tl.load(counts + cell, mask=inside, other=0) + rank
    tl.store(slot_n + row, slot.to(tl.int64), mask=inside)
    tl.store(row_of_slot + slot, row.to(tl.int64), mask=inside)


@triton.jit
def _gather(source, slot_n, out, source_stride, out_stride, per_token, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(slot_n + row) // per_token
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    tl.store(
        out + row * out_stride + column,
        tl.load(source + token * source_stride + column, mask=inside),
        mask=inside,
    )


@triton.jit
def _combine(
    rows,
    row_of_slot,
    weight,
    out,
    rows_stride,
    out_stride,
    width,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        row = tl.load(row_of_slot + token * K + k)
        values = tl.load(rows + row * rows_stride + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weight + row).to(tl.float32)
        total += values
    target = out + token * out_stride + column
    tl.store(target, tl.load(target, mask=inside, other=0.0) + total, mask=inside)


@triton.jit
def _combine_backward(
    dy,
    rows,
    slot_n,
    weight,
    drows,
    dweight,
    dy_stride,
    rows_stride,
    drows_stride,
    per_token,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(slot_n + row) // per_token
    w = tl.load(weight + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        d = tl.load(dy + token * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        total += d * tl.load(rows + row * rows_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(drows + row * drows_stride + column, (w * d).to(drows.dtype.element_ty), mask=inside)
    tl.store(dweight + row, tl.sum(total, axis=0))


def sort(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = ids_TK.reshape(-1)
    slots, device = ids.numel(), ids.device
    slot_n, row_of_slot = (torch.empty(slots, dtype=torch.int64, device=device) for _ in range(2))
    if not slots:
        return slot_n, row_of_slot, torch.zeros(num_experts, dtype=torch.int32, device=device)
    blocks = triton.cdiv(slots, SLOTS)
    counts = torch.empty((num_experts, blocks), dtype=torch.int32, device=device)
    _count[(blocks,)](ids, counts, slots, num_experts, SLOTS=SLOTS, EXPERTS=EXPERTS)
    ends = counts.view(-1).cumsum(0, dtype=torch.int32)
    _place[(blocks,)](ids, ends, counts, slot_n, row_of_slot, slots, SLOTS=SLOTS)
    return slot_n, row_of_slot, ends.view(num_experts, blocks)[:, -1].contiguous()


def gather(source_TD: Tensor, slot_n: Tensor, per_token: int, out: Tensor) -> None:
    width, block = source_TD.shape[1], min(power_of_two(source_TD.shape[1]), 2048)
    if slot_n.numel():
        _gather[(slot_n.numel(), triton.cdiv(width, block))](
            source_TD, slot_n, out, source_TD.stride(0), out.stride(0), per_token, width, BLOCK=block
        )


def combine(rows_nD: Tensor, row_of_slot: Tensor, weight_n: Tensor | None, out_TD: Tensor) -> None:
    tokens, width = out_TD.shape
    block = min(power_of_two(width), 1024)
    if tokens:
        _combine[(tokens, triton.cdiv(width, block))](
            rows_nD,
            row_of_slot,
            rows_nD if weight_n is None else weight_n,
            out_TD,
            rows_nD.stride(0),
            out_TD.stride(0),
            width,
            K=row_of_slot.numel() // tokens,
            WEIGHTED=weight_n is not None,
            BLOCK=block,
        )


def combine_backward(
    dy_TD: Tensor,
    rows_nD: Tensor,
    slot_n: Tensor,
    per_token: int,
    weight_n: Tensor,
    drows_nD: Tensor,
    dweight_n: Tensor,
) -> None:
    width = dy_TD.shape[1]
    if slot_n.numel():
        _combine_backward[(slot_n.numel(),)](
            dy_TD,
            rows_nD,
            slot_n,
            weight_n,
            drows_nD,
            dweight_n,
            dy_TD.stride(0),
            rows_nD.stride(0),
            drows_nD.stride(0),
            per_token,
            width,
            BLOCK=min(power_of_two(width), 1024),
        )
