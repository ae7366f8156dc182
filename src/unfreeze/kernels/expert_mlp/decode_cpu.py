"""The expert MLP for a handful of tokens on CPU, straight from the INT4 codes.

For generation, where each expert sees one row or a few. The groups of `fused` would expand every expert into
memory, start a GEMM of one row on it and return to Python thirty times per expert. Here two loops cover the
whole layer: a weight row is expanded in registers, multiplied with up to four of the expert's rows, and
discarded (row_dots.py).

Arithmetic in float32 with the same weights (bf16-rounded, as the checkpoint defines them) for any dtype of x.

n rows (a token at one expert), sorted by expert, A experts in use, D model width, I expert width, R rank of
gate and up, P rank of down.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.expand.codes import expandable, int4_codes
from unfreeze.kernels.expert_mlp.backend import HostRouting, Routing
from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.loops.numba_options import Kernel, array, exp, serial
from unfreeze.kernels.loops.row_dots import halves, int4_row, row_dots
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

# up to this mean one GEMM per expert is slower: at 4 by 2.3, at 6 by 1.6, at 8 by 1.2 (128 experts, one Zen 4
# thread)
ROWS_PER_EXPERT = 8
JOB_ROWS = 16  # weight rows of a job


class DecodeRows(NamedTuple):
    """The rows of a call for the loops: expert experts[a] has the rows begins[a] : begins[a + 1]."""

    token: np.ndarray  # int32 [n]
    weight: np.ndarray  # float32 [n]
    experts: np.ndarray  # int64 [A]
    begins: np.ndarray  # int64 [A + 1]


@serial
def _widen(x, out):
    halves(x, out)


# the compiler chooses the order of the sum: parallel vectors, the same at every call
@numba.njit(fastmath={"reassoc", "contract"})
def _thin_dot(A, x):
    """A · x, A in its own order, x in that of `halves`."""
    half, total = A.size // 2, np.float32(0.0)
    for i in range(half):
        total += A[2 * i] * x[i] + A[2 * i + 1] * x[half + i]
    return total


@Kernel
def _thin(start, stop, x, token, expert, A, out):
    """out[r, q] = A[expert[r], q] · x[token[r]]."""
    for r in range(start, stop):
        for q in range(A.shape[1]):
            out[r, q] = _thin_dot(A[expert[r], q], x[token[r]])


@Kernel
def _gate_up(start, stop, x, rows, weight, B, xA, scale, h):
    """h[r] = silu(gate) · up of the row's expert, in the order of `halves`.

    x      [T, D] in that order                weight  Int4Codes [E, 2I, D], gate rows first
    B, xA  [E, 2I, R], [n, 2R]: gate's columns, then up's     h  [n, I]
    """
    I, rank = h.shape[1], B.shape[2]
    # unpack the tuples once: numba counts a reference to an array at each access
    experts, begins, codes, scales = rows.experts, rows.begins, weight.codes, weight.scales
    blocks = (I + JOB_ROWS - 1) // JOB_ROWS
    for job in range(start, stop):
        a, first = job // blocks, job % blocks * JOB_ROWS
        e, begin, end = experts[a], begins[a], begins[a + 1]
        token = rows.token[begin:end]
        gates, ups = np.empty(token.size, np.float32), np.empty(token.size, np.float32)
        for i in range(first, min(first + JOB_ROWS, I)):
            # gate = W x, up = W x: one weight row each, times all the expert's rows
            row_dots(int4_row(codes[e, i], scales[e, i], weight.group_bytes), x, token, gates)
            row_dots(int4_row(codes[e, I + i], scales[e, I + i], weight.group_bytes), x, token, ups)
            place = i // 2 + i % 2 * (I // 2)
            for j in range(token.size):
                # + scale · B (A x), then SwiGLU
                r, gate, up = begin + j, gates[j], ups[j]
                for q in range(rank):
                    gate += scale * B[e, i, q] * xA[r, q]
                    up += scale * B[e, I + i, q] * xA[r, rank + q]
                h[r, place] = gate / (np.float32(1.0) + exp(-gate)) * up


@Kernel
def _down(start, stop, h, rows, weight, B, hA, scale, y):
    """y[token of r] += w_r · (down h[r] + scale · B hA[r]).

    h [n, I] in the order of `halves`, weight Int4Codes [E, D, I], B [E, D, R], hA [n, R], y [T, D]. For each
    d the experts come in order: the same bits each time.
    """
    D, rank = y.shape[1], B.shape[2]
    token, weights, experts, begins = rows.token, rows.weight, rows.experts, rows.begins
    codes, scales = weight.codes, weight.scales
    order = np.arange(token.size, dtype=np.int32)
    for block in range(start, stop):
        values = np.empty(token.size, np.float32)
        for a in range(experts.size):
            e, begin, end = experts[a], begins[a], begins[a + 1]
            for d in range(block * JOB_ROWS, min(block * JOB_ROWS + JOB_ROWS, D)):
                row_dots(int4_row(codes[e, d], scales[e, d], weight.group_bytes), h, order[begin:end], values)
                for r in range(begin, end):
                    value = values[r - begin]
                    for q in range(rank):
                        value += scale * B[e, d, q] * hA[r, q]
                    y[token[r], d] += weights[r] * value


def supports(routing: Routing, gate_up: Packed, down: Packed) -> bool:
    """True if a call without gradients suits these loops.

    INT4 codes in groups of 32 or a multiple, as in published models, and few rows per expert in use.
    """
    return reads(routing.num_rows, len(routing.experts), gate_up, down)


def reads(rows: int, experts: int, gate_up: Packed, down: Packed) -> bool:
    """`supports` for that many rows at that many experts in use."""
    if not 0 < rows <= ROWS_PER_EXPERT * experts:
        return False
    return all(
        expandable(base) and isinstance(base.codec, Int4) and base.codec.group_size % 32 == 0
        for base in (gate_up, down)
    )


def decode(
    x_TD: Tensor, routing: HostRouting, gate_up: Packed, down: Packed, factors: ExpertFactors
) -> Tensor:
    """As fused_expert_mlp, without gradients. `routing` has no padded rows (made for float32)."""
    T, D = x_TD.shape
    E, I, n = gate_up.shape[0], down.shape[-1], routing.num_rows
    experts = np.asarray(routing.experts)
    rows = DecodeRows(
        array(routing.token_n), array(routing.weight_n), experts, np.cumsum([0, *routing.sizes])
    )
    expert_n = np.repeat(experts, routing.sizes)
    x = np.empty((T, D), np.float32)
    _widen(array(x_TD), x)

    # h = silu(gate) · up
    h = np.empty((n, I), np.float32)
    A, B = _factors(factors.gate_up_A, factors.gate_up_B, D, 2 * I, E)
    xA = _thin_products(x, rows.token, expert_n, A)
    scale = np.float32(factors.scale)
    jobs = experts.size * -(-I // JOB_ROWS)
    _gate_up(n * 2 * I * D, jobs, x, rows, int4_codes(gate_up), B, xA, scale, h)

    # y[token] += w · down h
    y = torch.zeros((T, D), dtype=torch.float32)
    A, B = _factors(factors.down_A, factors.down_B, I, D, E)
    hA = _thin_products(h, np.arange(n, dtype=np.int32), expert_n, A)
    scale = np.float32(factors.down_scale)
    _down(n * I * D, -(-D // JOB_ROWS), h, rows, int4_codes(down), B, hA, scale, array(y))
    return y.to(x_TD.dtype)


def _factors(
    A: Tensor | None, B: Tensor | None, inputs: int, outputs: int, num_experts: int
) -> tuple[np.ndarray, np.ndarray]:
    """(A [E, R, in], B [E, out, R]) in float32; of rank 0 if there is no adapter."""
    if A is None or B is None:
        shapes = (num_experts, 0, inputs), (num_experts, outputs, 0)
        return np.empty(shapes[0], np.float32), np.empty(shapes[1], np.float32)
    return array(A.detach().float()), array(B.detach().float())


def _thin_products(x: np.ndarray, token: np.ndarray, expert: np.ndarray, A: np.ndarray) -> np.ndarray:
    """A x of every row [n, R]; x in the order of `halves`."""
    out = np.empty((token.size, A.shape[1]), np.float32)
    if out.size:
        _thin(out.size * x.shape[1], token.size, x, token, expert, A, out)
    return out
