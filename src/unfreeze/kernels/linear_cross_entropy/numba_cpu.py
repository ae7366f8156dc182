"""The softmax of one block of logits and its gradient on CPU, in the memory of the logits.

One row at a time while it is in cache. A row of 151,936 words is 304 kB in bf16, within a core's L2. torch
reads and writes float32 copies of the whole block five times.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.loops.lanes import largest, total
from unfreeze.kernels.loops.numba_options import LANES, Kernel, array, exp, inner, narrow, widen


@inner
def _sum_of_exponentials(row, shift):
    """sum_i exp(row[i] - shift); NaN if any number is NaN (exp itself would clamp it)."""
    lanes = np.zeros(LANES, np.float32)
    whole = row.size // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            z = widen(row[i + j])
            e = exp(np.float32(z - shift))
            lanes[j] += e if z == z else np.float32(np.nan)
    for i in range(whole, row.size):
        z = widen(row[i])
        e = exp(np.float32(z - shift))
        lanes[i - whole] += e if z == z else np.float32(np.nan)
    return total(lanes)


@Kernel
def _softmax_gradient(start, stop, z, target, weight, wanted, log_p, wins):
    for r in range(start, stop):
        row = z[r]
        at = widen(row[target[r]])
        shift = largest(row)
        denominator = _sum_of_exponentials(row, shift)
        log_p[r] = np.float32(np.float32(at - shift) - np.float32(np.log(denominator)))
        wins[r] = at >= shift
        if wanted:
            share = np.float32(weight[r] / denominator)
            for i in range(row.size):
                row[i] = narrow(np.float32(exp(np.float32(widen(row[i]) - shift)) * share), row[i])
            p = np.float32(exp(np.float32(at - shift)) / denominator)
            row[target[r]] = narrow(np.float32(np.float32(p - np.float32(1.0)) * weight[r]), row[0])


def softmax_gradient(
    logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.softmax_gradient, for float32 and bf16."""
    log_p_N, wins_N = (
        torch.empty(len(targets_N), dtype=torch.float32),
        torch.empty(len(targets_N), dtype=torch.bool),
    )
    logits_NV = logits_NV.contiguous()
    z, target, weight = (array(x.contiguous()) for x in (logits_NV, targets_N, weights_N.float()))
    _softmax_gradient(logits_NV.numel(), len(z), z, target, weight, wanted, array(log_p_N), array(wins_N))
    return log_p_N, wins_N, logits_NV
