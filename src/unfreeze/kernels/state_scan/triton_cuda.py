"""The scan of states on CUDA: a program per document, head and columns of the state, which stay in registers.

Functions as in reference.py. C, k and v are padded to powers of two of at least 16.
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

COLUMNS = 32  # of a state in a program: 128 x 32 float32 are 16 KB of registers
# float32 products: three TF32 products keep 21 bits; AMD's compiler has no such mode
PRECISION = "ieee" if torch.version.hip else "tf32x3"


@triton.jit
def _forward(
    u, w, k, a, state, before, own, after, first, steps, heads,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    document, head, column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * VB + tl.arange(0, VB)
    row, key = tl.arange(0, CB), tl.arange(0, KB)
    in_state = (key[:, None] < K) & (column[None, :] < V)
    in_u, in_k = (row[:, None] < C) & (column[None, :] < V), (row[:, None] < C) & (key[None, :] < K)
    at_state = key[:, None] * V + column[None, :]
    here = (document * heads + head).to(tl.int64) * K * V
    S = tl.load(state + here + at_state, mask=in_state, other=0.0)
    for step in range(0, tl.load(steps + document)):
        chunk = (tl.load(first + step) + document).to(tl.int64) * heads + head
        tl.store(before + chunk * K * V + at_state, S, mask=in_state)
        at_u = chunk * C * V + row[:, None] * V + column[None, :]
        at_k = chunk * C * K + row[:, None] * K + key[None, :]
        U = tl.load(u + at_u, mask=in_u, other=0.0)
        if DELTA:
            U -= tl.dot(tl.load(w + at_k, mask=in_k, other=0.0), S, input_precision=PRECISION)
            tl.store(own + at_u, U, mask=in_u)
        if CHANNEL:
            decay = tl.load(a + chunk * K + key, mask=key < K, other=0.0)[:, None]
        else:
            decay = tl.load(a + chunk)
        keys = tl.load(k + at_k, mask=in_k, other=0.0)
        S = S * decay + tl.dot(tl.trans(keys), U, input_precision=PRECISION)
    tl.store(after + here + at_state, S, mask=in_state)


@triton.jit
def _backward(
    dbefore, du, dafter, w, k, a, g, d, dstate, first, steps, heads,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    DELTA: tl.constexpr, CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    document, head, column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * VB + tl.arange(0, VB)
    row, key = tl.arange(0, CB), tl.arange(0, KB)
    in_state = (key[:, None] < K) & (column[None, :] < V)
    in_u, in_k = (row[:, None] < C) & (column[None, :] < V), (row[:, None] < C) & (key[None, :] < K)
    at_state = key[:, None] * V + column[None, :]
    here = (document * heads + head).to(tl.int64) * K * V
    D = tl.load(dafter + here + at_state, mask=in_state, other=0.0)
    count = tl.load(steps + document)
    for back in range(0, count):
        chunk = (tl.load(first + count - 1 - back) + document).to(tl.int64) * heads + head
        tl.store(d + chunk * K * V + at_state, D, mask=in_state)
        at_u = chunk * C * V + row[:, None] * V + column[None, :]
        at_k = chunk * C * K + row[:, None] * K + key[None, :]
        keys = tl.load(k + at_k, mask=in_k, other=0.0)
        G = tl.load(du + at_u, mask=in_u, other=0.0) + tl.dot(keys, D, input_precision=PRECISION)
        tl.store(g + at_u, G, mask=in_u)
        if CHANNEL:
            decay = tl.load(a + chunk * K + key, mask=key < K, other=0.0)[:, None]
        else:
            decay = tl.load(a + chunk)
        D = D * decay + tl.load(dbefore + chunk * K * V + at_state, mask=in_state, other=0.0)
        if DELTA:
            wt = tl.trans(tl.load(w + at_k, mask=in_k, other=0.0))
            D -= tl.dot(wt, G, input_precision=PRECISION)
    tl.store(dstate + here + at_state, D, mask=in_state)


def _sizes(u: Tensor, k: Tensor, w: Tensor | None, a: Tensor) -> dict[str, int | bool | str]:
    (C, V), K = u.shape[-2:], k.shape[-1]
    padded = {name: max(16, power_of_two(size)) for name, size in (("CB", C), ("KB", K))}
    columns = max(16, min(COLUMNS, power_of_two(V)))
    flags = {"DELTA": w is not None, "CHANNEL": a.shape[-2] > 1, "PRECISION": PRECISION}
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
    _forward[grid](u, w, k, a, state, before, own, after, *places, **sizes, num_warps=4)
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
    _backward[grid](dbefore, du, dafter, w, k, a, g, d, dstate, *places, **sizes, num_warps=4)
    return g, d, dstate
