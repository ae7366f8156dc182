"""Reductions over a row in LANES parallel partial results, which LLVM vectorises.

A plain loop over floats is a chain: each addition waits for the previous one, and the compiler may not
reorder them. Lane j takes the numbers j, j + LANES, …; the order is fixed, so results are bit-identical.
"""

from __future__ import annotations

import numba
import numpy as np

from unfreeze.kernels.loops.numba_options import LANES, exp, inner, widen


@numba.njit(inline="always")
def total(lanes):
    """Σ_j lanes[j], from left to right, in float32."""
    result = np.float32(0.0)
    for j in range(LANES):
        result += lanes[j]
    return result


@inner
def largest(row):
    """max_i row[i] in float32; -inf for an empty row."""
    lanes = np.full(LANES, -np.inf, np.float32)
    whole = row.size // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            lanes[j] = max(lanes[j], widen(row[i + j]))
    for i in range(whole, row.size):
        lanes[0] = max(lanes[0], widen(row[i]))
    result = lanes[0]
    for j in range(1, LANES):
        result = max(result, lanes[j])
    return result


@inner
def exponentials(row, scale, shift):
    """row[i] = exp(scale · row[i] - shift), row float32; returns their sum."""
    lanes = np.zeros(LANES, np.float32)
    whole = row.size // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            e = exp(np.float32(np.float32(scale * row[i + j]) - shift))
            row[i + j] = e
            lanes[j] += e
    for i in range(whole, row.size):
        e = exp(np.float32(np.float32(scale * row[i]) - shift))
        row[i] = e
        lanes[0] += e
    return total(lanes)
