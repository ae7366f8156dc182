"""The scan of states on CUDA: a program per document, head and columns of the state, which stay in registers.

Functions as in reference.py. C, k and v are padded to powers of two of at least 16; k is at most 128.
"""

# A launch takes numbers for constexpr parameters, and num_warps, which the kernel's signature doesn't declare
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.loops.triton_options import power_of_two

if TYPE_CHECKING:
    from unfreeze.kernels.state_scan import Steps

COLUMNS = 16  # of a state in a program
KEYS = 64  # rows of a half of a state: products with all 128 spill 1.3 KB a thread on sm_90
# float32 products: three TF32 products keep 21 bits; AMD's compiler has no such mode
PRECISION = "ieee" if torch.version.hip else "tf32x3"
STAGES = 1 if torch.version.hip else 3  # loads ahead: two of a chunk exceed the 64 KiB of an MI300X


@triton.jit
def _state(tensor, at, key, column, V, inside):
    """Rows `key` of a state's columns."""
    return tl.load(tensor + at + key[:, None] * V + column[None, :], mask=inside, other=0.0)


@triton.jit
def _decay(a, chunk, key, K, CHANNEL: tl.constexpr):
    if CHANNEL:
        return tl.load(a + chunk * K + key, mask=key < K, other=0.0)[:, None]
    else:
        return tl.load(a + chunk)


@triton.jit
def _forward(
    u, w, k, a, state, before, own, after, first, steps, heads,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    TWO: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    document, head, column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * VB + tl.arange(0, VB)
    row, key = tl.arange(0, CB), tl.arange(0, KB)
    high = key + KB  # of the second half of the keys
    in_low = (key[:, None] < K) & (column[None, :] < V)
    in_high = (high[:, None] < K) & (column[None, :] < V)
    in_u = (row[:, None] < C) & (column[None, :] < V)
    k_low, k_high = (row[:, None] < C) & (key[None, :] < K), (row[:, None] < C) & (high[None, :] < K)
    here = (document * heads + head).to(tl.int64) * K * V
    S = _state(state, here, key, column, V, in_low)
    if TWO:
        S2 = _state(state, here, high, column, V, in_high)
    for step in range(0, tl.load(steps + document)):
        chunk = (tl.load(first + step) + document).to(tl.int64) * heads + head
        tl.store(before + chunk * K * V + key[:, None] * V + column[None, :], S, mask=in_low)
        if TWO:
            tl.store(before + chunk * K * V + high[:, None] * V + column[None, :], S2, mask=in_high)
        at_u = chunk * C * V + row[:, None] * V + column[None, :]
        at_k = chunk * C * K + row[:, None] * K
        U = tl.load(u + at_u, mask=in_u, other=0.0)
        if DELTA:
            W = tl.load(w + at_k + key[None, :], mask=k_low, other=0.0)
            U -= tl.dot(W, S, input_precision=PRECISION)
            if TWO:
                W = tl.load(w + at_k + high[None, :], mask=k_high, other=0.0)
                U -= tl.dot(W, S2, input_precision=PRECISION)
            tl.store(own + at_u, U, mask=in_u)
        keys = tl.trans(tl.load(k + at_k + key[None, :], mask=k_low, other=0.0))
        S = S * _decay(a, chunk, key, K, CHANNEL) + tl.dot(keys, U, input_precision=PRECISION)
        if TWO:
            keys = tl.trans(tl.load(k + at_k + high[None, :], mask=k_high, other=0.0))
            S2 = S2 * _decay(a, chunk, high, K, CHANNEL) + tl.dot(keys, U, input_precision=PRECISION)
    tl.store(after + here + key[:, None] * V + column[None, :], S, mask=in_low)
    if TWO:
        tl.store(after + here + high[:, None] * V + column[None, :], S2, mask=in_high)


@triton.jit
def _backward(
    dbefore, du, dafter, w, k, a, g, d, dstate, first, steps, heads,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    TWO: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    document, head, column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * VB + tl.arange(0, VB)
    row, key = tl.arange(0, CB), tl.arange(0, KB)
    high = key + KB
    in_low = (key[:, None] < K) & (column[None, :] < V)
    in_high = (high[:, None] < K) & (column[None, :] < V)
    in_u = (row[:, None] < C) & (column[None, :] < V)
    k_low, k_high = (row[:, None] < C) & (key[None, :] < K), (row[:, None] < C) & (high[None, :] < K)
    here = (document * heads + head).to(tl.int64) * K * V
    D = _state(dafter, here, key, column, V, in_low)
    if TWO:
        D2 = _state(dafter, here, high, column, V, in_high)
    count = tl.load(steps + document)
    for back in range(0, count):
        chunk = (tl.load(first + count - 1 - back) + document).to(tl.int64) * heads + head
        tl.store(d + chunk * K * V + key[:, None] * V + column[None, :], D, mask=in_low)
        at_u = chunk * C * V + row[:, None] * V + column[None, :]
        at_k = chunk * C * K + row[:, None] * K
        keys = tl.load(k + at_k + key[None, :], mask=k_low, other=0.0)
        G = tl.load(du + at_u, mask=in_u, other=0.0) + tl.dot(keys, D, input_precision=PRECISION)
        if TWO:
            tl.store(d + chunk * K * V + high[:, None] * V + column[None, :], D2, mask=in_high)
            keys = tl.load(k + at_k + high[None, :], mask=k_high, other=0.0)
            G += tl.dot(keys, D2, input_precision=PRECISION)
        tl.store(g + at_u, G, mask=in_u)
        D = D * _decay(a, chunk, key, K, CHANNEL) + _state(dbefore, chunk * K * V, key, column, V, in_low)
        if DELTA:
            W = tl.trans(tl.load(w + at_k + key[None, :], mask=k_low, other=0.0))
            D -= tl.dot(W, G, input_precision=PRECISION)
        if TWO:
            more = _state(dbefore, chunk * K * V, high, column, V, in_high)
            D2 = D2 * _decay(a, chunk, high, K, CHANNEL) + more
            if DELTA:
                W = tl.trans(tl.load(w + at_k + high[None, :], mask=k_high, other=0.0))
                D2 -= tl.dot(W, G, input_precision=PRECISION)
    tl.store(dstate + here + key[:, None] * V + column[None, :], D, mask=in_low)
    if TWO:
        tl.store(dstate + here + high[:, None] * V + column[None, :], D2, mask=in_high)


def _sizes(u: Tensor, k: Tensor, w: Tensor | None, a: Tensor) -> dict[str, int | bool | str]:
    (C, V), K = u.shape[-2:], k.shape[-1]
    padded = {"CB": max(16, power_of_two(C)), "KB": max(16, min(KEYS, power_of_two(K)))}
    columns = max(16, min(COLUMNS, power_of_two(V)))
    flags = {"TWO": K > KEYS, "DELTA": w is not None, "CHANNEL": a.shape[-2] > 1, "PRECISION": PRECISION}
    return {"C": C, "K": K, "V": V, **padded, "VB": columns, **flags}


def forward(
    u: Tensor, w: Tensor | None, k: Tensor, a: Tensor, state: Tensor, steps: Steps
) -> tuple[Tensor, Tensor, Tensor]:
    u, k, a, state = (x.contiguous() for x in (u, k, a, state))
    w = None if w is None else w.contiguous()
    before = u.new_empty(len(u), *state.shape[1:])
    after, own = torch.empty_like(state), u if w is None else torch.empty_like(u)
    sizes = _sizes(u, k, w, a)
    grid = (*state.shape[:2], triton.cdiv(state.shape[-1], sizes["VB"]))
    places = steps.first_i, steps.steps_S, state.shape[1]
    _forward[grid](u, w, k, a, state, before, own, after, *places, **sizes, num_warps=8, num_stages=STAGES)
    return before, own, after


def backward(
    dbefore: Tensor, du: Tensor, dafter: Tensor, w: Tensor | None, k: Tensor, a: Tensor, steps: Steps
) -> tuple[Tensor, Tensor, Tensor]:
    dbefore, du, dafter, k, a = (x.contiguous() for x in (dbefore, du, dafter, k, a))
    w = None if w is None else w.contiguous()
    g, d, dstate = torch.empty_like(du), torch.empty_like(dbefore), torch.empty_like(dafter)
    sizes = _sizes(du, k, w, a)
    grid = (*dafter.shape[:2], triton.cdiv(dafter.shape[-1], sizes["VB"]))
    places = steps.first_i, steps.steps_S, dafter.shape[1]
    _backward[grid](
        dbefore, du, dafter, w, k, a, g, d, dstate, *places, **sizes, num_warps=8, num_stages=STAGES
    )
    return g, d, dstate
