"""The expert MLP for a handful of tokens on CPU, straight from the INT4 codes: generation, where each expert sees one row or a few.

The groups of `fused` would expand every expert into memory, start a GEMM of one row on it and cross Python thirty times an expert. Here two
loops cover the whole layer: a weight row is expanded into the first-level cache, used for the expert's rows, and forgotten. Arithmetic in float32
with the same weights (bf16-rounded, as the checkpoint defines them) whatever the dtype of x.

n rows (a token at one expert), sorted by expert, A experts in use, D model width, I expert width, R rank of gate and up, P rank of down.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.expert_mlp.loop_cpu import Routing
from unfreeze.kernels.int4_expand import numba_cpu
from unfreeze.kernels.numba_options import Kernel, array, exp
from unfreeze.quant.codec import Packed

ROWS_PER_EXPERT = 4  # up to here on average; beyond, one GEMM per expert is faster
BLOCK = 16  # weight rows of a job


@numba.njit
def _expand_row(codes, scales, half, out):
    """One weight row as float32, even elements in the first half of `out`, odd ones in the second. codes uint8 [in / 2], scales uint16 [G]."""
    width = codes.size
    for g in range(scales.size):
        s = np.uint32(np.uint32(scales[g]) << np.uint32(16)).view(np.float32)
        source, low, high = codes[g * half : g * half + half], out[g * half : g * half + half], out[width + g * half : width + g * half + half]
        for i in range(half):
            byte = np.uint32(source[i])
            low[i] = np.uint32(numba_cpu.rounded(byte & np.uint32(15), s) & np.uint32(0xFFFF0000)).view(np.float32)
            high[i] = np.uint32(numba_cpu.rounded(byte >> np.uint32(4), s) & np.uint32(0xFFFF0000)).view(np.float32)


@numba.njit(fastmath={"reassoc", "contract"})  # the order of the sum is the compiler's: four vectors side by side, the same at every call
def _dot(a, b):
    total = np.float32(0.0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@Kernel
def _thin(x, token, expert, A, out):
    """out[r, q] = A[expert[r], q] · x[token[r]]."""
    for r in prange(token.size):
        for q in range(A.shape[1]):
            out[r, q] = _dot(A[expert[r], q], x[token[r]])


@Kernel
def _gate_up(x, token, experts, begins, codes, scales, half, B, thin, factor, h):
    """h[r] = silu(gate) · up of the row's expert. x [T, D] with even elements first; thin [n, 2R], B [E, 2I, R]."""
    I, rank = h.shape[1], B.shape[2]
    blocks = (I + BLOCK - 1) // BLOCK
    for job in prange(experts.size * blocks):
        a, first = job // blocks, job % blocks * BLOCK
        e = experts[a]
        gate_row, up_row = np.empty(x.shape[1], np.float32), np.empty(x.shape[1], np.float32)
        for i in range(first, min(first + BLOCK, I)):
            _expand_row(codes[e, i], scales[e, i], half, gate_row)
            _expand_row(codes[e, I + i], scales[e, I + i], half, up_row)
            for r in range(begins[a], begins[a + 1]):
                gate, up = _dot(gate_row, x[token[r]]), _dot(up_row, x[token[r]])
                for q in range(rank):
                    gate += factor * B[e, i, q] * thin[r, q]
                    up += factor * B[e, I + i, q] * thin[r, rank + q]
                h[r, i] = gate / (np.float32(1.0) + exp(-gate)) * up


@Kernel
def _down(h, token, weight, experts, begins, codes, scales, half, B, thin, factor, y):
    """y[token[r], d] += weight[r] · (down row d · h[r]). h [n, I] with even elements first. Experts in order for each d: the same bits each time."""
    D, rank = y.shape[1], B.shape[2]
    for block in prange((D + BLOCK - 1) // BLOCK):
        row = np.empty(h.shape[1], np.float32)
        for a in range(experts.size):
            e = experts[a]
            for d in range(block * BLOCK, min(block * BLOCK + BLOCK, D)):
                _expand_row(codes[e, d], scales[e, d], half, row)
                for r in range(begins[a], begins[a + 1]):
                    value = _dot(row, h[r])
                    for q in range(rank):
                        value += factor * B[e, d, q] * thin[r, q]
                    y[token[r], d] += weight[r] * value


def suits(routing: Routing, gate_up: Any, down: Any) -> bool:
    """Whether a call without gradients is one for these loops: INT4 codes they can read, and few rows per expert in use."""
    readable = all(isinstance(base, Packed) and numba_cpu.expandable(base) for base in (gate_up, down))
    return readable and 0 < routing.num_rows <= ROWS_PER_EXPERT * len(routing.experts)


def decode(x_TD: Tensor, routing: Routing, gate_up: Packed, down: Packed, factors: ExpertFactors) -> Tensor:
    """As fused_expert_mlp, without gradients. `routing` without padded rows (made for float32)."""
    up, low = numba_cpu.Expander(gate_up), numba_cpu.Expander(down)
    I, n = down.shape[-1], routing.num_rows
    x = _halves(x_TD.float())
    token, weight = array(routing.token_n), array(routing.weight_n)
    experts, begins = np.asarray(routing.experts), np.cumsum([0, *routing.sizes])
    expert_n = np.repeat(experts, routing.sizes)
    h, y = torch.empty((n, I)), torch.zeros(x_TD.shape, dtype=torch.float32)

    thin, B = _adapter(x, token, expert_n, factors.gate_up_A, factors.gate_up_B, 2 * I, gate_up.shape[0])
    _gate_up(n * 2 * I * x.shape[1], array(x), token, experts, begins, up.codes, up.scales, up.half, B, thin, np.float32(factors.scale), array(h))
    h = _halves(h)
    rows = np.arange(n, dtype=np.int32)
    thin, B = _adapter(h, rows, expert_n, factors.down_A, factors.down_B, y.shape[1], gate_up.shape[0])
    job = (array(h), token, weight, experts, begins, low.codes, low.scales, low.half, B, thin, np.float32(factors.down_scale), array(y))
    _down(n * I * y.shape[1], *job)
    return y.to(x_TD.dtype)


def _halves(x: Tensor) -> Tensor:
    """Even elements of each row first, then the odd ones: the order in which _expand_row leaves a weight row."""
    return torch.cat((x[:, 0::2], x[:, 1::2]), dim=1)


def _adapter(x: Tensor, token: np.ndarray, expert: np.ndarray, A: Tensor | None, B: Tensor | None, out: int, num_experts: int) -> Any:
    """(A x of every row, B) in float32; of rank 0 where there is no adapter. x in the order of _halves."""
    if A is None or B is None:
        return np.empty((token.size, 0), np.float32), np.empty((num_experts, out, 0), np.float32)
    in_use = torch.from_numpy(np.unique(expert))
    halves = torch.zeros((num_experts, *A.shape[1:])) if len(in_use) < num_experts else torch.empty(A.shape)
    halves[in_use] = _halves(A.detach()[in_use].float().flatten(0, 1)).unflatten(0, (len(in_use), -1))
    thin = np.empty((token.size, A.shape[1]), np.float32)
    _thin(thin.size * x.shape[1], array(x), token, expert, array(halves), thin)
    return thin, array(B.detach().float())
