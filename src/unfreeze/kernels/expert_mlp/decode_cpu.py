"""The expert MLP for a handful of tokens on CPU, straight from the INT4 codes: generation, where each expert sees one row or a few.

The groups of `fused` would expand every expert into memory, start a GEMM of one row on it and cross Python thirty times an expert. Here two
loops cover the whole layer: a weight row is expanded in registers, multiplied with up to four of the expert's rows, and forgotten (row_dots.py).
Arithmetic in float32 with the same weights (bf16-rounded, as the checkpoint defines them) whatever the dtype of x.

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
from unfreeze.kernels.loops.numba_options import Kernel, array, exp, serial
from unfreeze.kernels.loops.row_dots import halves, int4_row, row_dots
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

ROWS_PER_EXPERT = 8  # up to here on average one GEMM per expert is slower: at 4 by 2.3, at 6 by 1.6, at 8 by 1.2 (128 experts, one Zen 4 thread)
BLOCK = 16  # weight rows of a job


@serial
def _widen(x, out):
    halves(x, out)


@numba.njit(fastmath={"reassoc", "contract"})  # the order of the sum is the compiler's: vectors side by side, the same at every call
def _thin_dot(A, x):
    """A · x, A in its own order, x in that of `halves`."""
    half, total = A.size // 2, np.float32(0.0)
    for i in range(half):
        total += A[2 * i] * x[i] + A[2 * i + 1] * x[half + i]
    return total


@Kernel
def _thin(x, token, expert, A, out):
    """out[r, q] = A[expert[r], q] · x[token[r]]."""
    for r in prange(token.size):
        for q in range(A.shape[1]):
            out[r, q] = _thin_dot(A[expert[r], q], x[token[r]])


@Kernel
def _gate_up(x, token, experts, begins, codes, scales, half, B, thin, factor, h):
    """h[r] = silu(gate) · up of the row's expert. x [T, D] and h [n, I] with even elements first; thin [n, 2R], B [E, 2I, R]."""
    I, rank = h.shape[1], B.shape[2]
    blocks = (I + BLOCK - 1) // BLOCK
    for job in prange(experts.size * blocks):
        a, first = job // blocks, job % blocks * BLOCK
        e, rows = experts[a], token[begins[a] : begins[a + 1]]
        gates, ups = np.empty(rows.size, np.float32), np.empty(rows.size, np.float32)
        for i in range(first, min(first + BLOCK, I)):
            row_dots(int4_row(codes[e, i], scales[e, i], half), x, rows, gates)
            row_dots(int4_row(codes[e, I + i], scales[e, I + i], half), x, rows, ups)
            place = i // 2 + i % 2 * (I // 2)
            for j in range(rows.size):
                r, gate, up = begins[a] + j, gates[j], ups[j]
                for q in range(rank):
                    gate += factor * B[e, i, q] * thin[r, q]
                    up += factor * B[e, I + i, q] * thin[r, rank + q]
                h[r, place] = gate / (np.float32(1.0) + exp(-gate)) * up


@Kernel
def _down(h, token, weight, experts, begins, codes, scales, half, B, thin, factor, y):
    """y[token[r], d] += weight[r] · (down row d · h[r]). h [n, I] with even elements first. Experts in order for each d: the same bits each time."""
    D, rank = y.shape[1], B.shape[2]
    order = np.arange(token.size, dtype=np.int32)
    for block in prange((D + BLOCK - 1) // BLOCK):
        values = np.empty(token.size, np.float32)
        for a in range(experts.size):
            e, begin, end = experts[a], begins[a], begins[a + 1]
            for d in range(block * BLOCK, min(block * BLOCK + BLOCK, D)):
                row_dots(int4_row(codes[e, d], scales[e, d], half), h, order[begin:end], values)
                for r in range(begin, end):
                    value = values[r - begin]
                    for q in range(rank):
                        value += factor * B[e, d, q] * thin[r, q]
                    y[token[r], d] += weight[r] * value


def suits(routing: Routing, gate_up: Any, down: Any) -> bool:
    """Whether a call without gradients is one for these loops: INT4 codes they can read (groups of 32 or a multiple, as published models have),
    and few rows per expert in use."""
    bases = [base for base in (gate_up, down) if isinstance(base, Packed) and isinstance(base.codec, Int4) and base.codec.group_size % 32 == 0]
    readable = len(bases) == 2 and all(numba_cpu.expandable(base) for base in bases)
    return readable and 0 < routing.num_rows <= ROWS_PER_EXPERT * len(routing.experts)


def decode(x_TD: Tensor, routing: Routing, gate_up: Packed, down: Packed, factors: ExpertFactors) -> Tensor:
    """As fused_expert_mlp, without gradients. `routing` without padded rows (made for float32)."""
    up, low = numba_cpu.Expander(gate_up), numba_cpu.Expander(down)
    I, n = down.shape[-1], routing.num_rows
    token, weight = array(routing.token_n), array(routing.weight_n)
    experts, begins = np.asarray(routing.experts), np.cumsum([0, *routing.sizes])
    expert_n = np.repeat(experts, routing.sizes)
    x, h, y = np.empty(x_TD.shape, np.float32), np.empty((n, I), np.float32), torch.zeros(x_TD.shape, dtype=torch.float32)
    _widen(array(x_TD), x)

    thin, B = _adapter(x, token, expert_n, factors.gate_up_A, factors.gate_up_B, 2 * I, gate_up.shape[0])
    _gate_up(n * 2 * I * x.shape[1], x, token, experts, begins, up.codes, up.scales, up.half, B, thin, np.float32(factors.scale), h)
    thin, B = _adapter(h, np.arange(n, dtype=np.int32), expert_n, factors.down_A, factors.down_B, y.shape[1], gate_up.shape[0])
    job = (h, token, weight, experts, begins, low.codes, low.scales, low.half, B, thin, np.float32(factors.down_scale), array(y))
    _down(n * I * y.shape[1], *job)
    return y.to(x_TD.dtype)


def _adapter(x: np.ndarray, token: np.ndarray, expert: np.ndarray, A: Tensor | None, B: Tensor | None, out: int, num_experts: int) -> Any:
    """(A x of every row, B) in float32; of rank 0 where there is no adapter. x in the order of `halves`."""
    if A is None or B is None:
        return np.empty((token.size, 0), np.float32), np.empty((num_experts, out, 0), np.float32)
    thin = np.empty((token.size, A.shape[1]), np.float32)
    _thin(thin.size * x.shape[1], x, token, expert, array(A.detach().float()), thin)
    return thin, array(B.detach().float())
