"""SwiGLU on CPU as one loop per function, a row at a time while it is in cache. Functions as in reference.py, float32 and bf16.

Arrays go in flat with the stride of their rows: of a strided 2-D array numba doesn't know that a row's elements lie side by side, and one
compilation serves contiguous and strided tensors.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import prange
from torch import Tensor

from unfreeze.kernels.numba_options import Kernel, array, exp, flat_rows, narrow, widen

ONE = np.float32(1.0)


@numba.njit(inline="always")
def _sigmoid(x):
    """1 / (1 + exp(-x)), relative error under 3e-7."""
    return np.float32(ONE / np.float32(ONE + exp(np.float32(-x))))


@Kernel
def _forward(gate, gate_stride, up, up_stride, h, h_stride, rows, width):
    for r in prange(rows):
        gates, ups = gate[r * gate_stride : r * gate_stride + width], up[r * up_stride : r * up_stride + width]
        target = h[r * h_stride : r * h_stride + width]
        for i in range(width):
            g = widen(gates[i])
            target[i] = narrow(np.float32(np.float32(g * _sigmoid(g)) * widen(ups[i])), gates[i])


@Kernel
def _backward(dh, dh_stride, gate, gate_stride, up, up_stride, dgate, dgate_stride, dup, dup_stride, rows, width):
    for r in prange(rows):
        grads = dh[r * dh_stride : r * dh_stride + width]
        gates, ups = gate[r * gate_stride : r * gate_stride + width], up[r * up_stride : r * up_stride + width]
        dgates, dups = dgate[r * dgate_stride : r * dgate_stride + width], dup[r * dup_stride : r * dup_stride + width]
        for i in range(width):
            g, d = widen(gates[i]), widen(grads[i])
            s = _sigmoid(g)
            silu = np.float32(g * s)
            slope = np.float32(s + np.float32(silu * np.float32(ONE - s)))
            dgates[i] = narrow(np.float32(np.float32(d * widen(ups[i])) * slope), gates[i])
            dups[i] = narrow(np.float32(d * silu), gates[i])


@numba.njit
def _score(dh, gate, up):
    """Σ_i dh[i] silu(gate[i]) up[i]. A loop of its own: with a fourth output LLVM gives up on vectorising (515 us instead of 84, 128 x 512)."""
    lanes = np.zeros(16, np.float32)  # sixteen sums side by side: a float sum is vectorised only where its order is written down
    whole = dh.size // 16 * 16
    for i in range(0, whole, 16):
        for j in range(16):
            g = widen(gate[i + j])
            lanes[j] += np.float32(np.float32(widen(dh[i + j]) * np.float32(g * _sigmoid(g))) * widen(up[i + j]))
    total = np.float32(0.0)
    for j in range(16):
        total += lanes[j]
    for i in range(whole, dh.size):
        g = widen(gate[i])
        total += np.float32(np.float32(widen(dh[i]) * np.float32(g * _sigmoid(g))) * widen(up[i]))
    return total


@Kernel
def _backward_weighted(
    dh, dh_stride, gate, gate_stride, up, up_stride, weight, weighted, weighted_stride, dgate, dgate_stride, dup, dup_stride, score, rows, width
):  # fmt: skip
    for r in prange(rows):
        grads = dh[r * dh_stride : r * dh_stride + width]
        gates, ups = gate[r * gate_stride : r * gate_stride + width], up[r * up_stride : r * up_stride + width]
        dgates, dups = dgate[r * dgate_stride : r * dgate_stride + width], dup[r * dup_stride : r * dup_stride + width]
        h = weighted[r * weighted_stride : r * weighted_stride + width]
        w = weight[r]
        for i in range(width):
            g, u, d = widen(gates[i]), widen(ups[i]), widen(grads[i])
            s = _sigmoid(g)
            silu = np.float32(g * s)
            wd = np.float32(w * d)
            h[i] = narrow(np.float32(w * np.float32(silu * u)), gates[i])
            dgates[i] = narrow(np.float32(np.float32(wd * u) * np.float32(s + np.float32(silu * np.float32(ONE - s)))), gates[i])
            dups[i] = narrow(np.float32(wd * silu), gates[i])
        score[r] = _score(grads, gates, ups)


def forward(gate: Tensor, up: Tensor, h: Tensor) -> None:
    rows, width = gate.shape
    _forward(gate.numel(), *flat_rows(gate), *flat_rows(up), *flat_rows(h), rows, width)


def backward(dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    rows, width = gate.shape
    _backward(gate.numel(), *flat_rows(dh), *flat_rows(gate), *flat_rows(up), *flat_rows(dgate), *flat_rows(dup), rows, width)


def backward_weighted(
    dh: Tensor, gate: Tensor, up: Tensor, weight_n: Tensor, weighted: Tensor, dgate: Tensor, dup: Tensor, score_n: Tensor
) -> None:
    """weight_n and score_n float32, contiguous."""
    rows, width = gate.shape
    _backward_weighted(
        gate.numel(), *flat_rows(dh), *flat_rows(gate), *flat_rows(up), array(weight_n), *flat_rows(weighted), *flat_rows(dgate),
        *flat_rows(dup), array(score_n), rows, width,
    )  # fmt: skip
