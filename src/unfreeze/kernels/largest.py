"""The largest score of each row, where it is, and whether the row's scores are numbers.

On a CPU a numba loop. It is no faster than torch's maximum (.8 ms for 16 rows of 151,936), but behind that a
thread of OpenMP spins for milliseconds on the core that the loops of the next step need.

S rows, V scores.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.loops.numba_options import Kernel, array, flat_rows, inner

PART = 1024  # scores that are looked at together
SIGN, INFINITE = 0x7FFFFFFF, 0x7F800000  # all bits but the sign; those of infinity: a NaN has more


@inner
def _largest(bits):
    """-> bits of the largest number, in the order of integers; bits of the largest magnitude.

    Integers, as LLVM makes no vectors of a maximum of floats, among which a NaN may be.
    """
    best, magnitude = np.int32(-SIGN - 1), np.int32(0)
    for i in range(bits.size):
        bit = bits[i]
        best = max(best, np.int32(bit ^ np.int32(np.int32(bit >> np.int32(31)) & np.int32(SIGN))))
        magnitude = max(magnitude, np.int32(bit & np.int32(SIGN)))
    return best, magnitude


@Kernel
def _rows(start, stop, scores, bits, stride, width, ids, finite):
    for r in range(start, stop):
        row, of_row = scores[r * stride : r * stride + width], bits[r * stride : r * stride + width]
        best, first, magnitude = np.int32(-SIGN - 1), 0, np.int32(0)
        for i in range(0, width, PART):
            value, size = _largest(of_row[i : i + PART])
            magnitude = max(magnitude, size)
            if value > best:
                best, first = value, i
        value = row[first]
        for i in range(first, min(first + PART, width)):
            value = max(value, row[i])
        numbers = magnitude <= INFINITE
        while numbers and row[first] != value:
            first += 1
        ids[r], finite[r] = first, numbers and np.isfinite(value)


def largest(scores_SV: Tensor) -> tuple[Tensor, Tensor]:
    """-> place of each row's largest score, the first of equal ones: int64 [S]; True if it is finite [S].

    A row with a NaN is not finite, and its place means nothing; -inf beside finite scores is allowed.
    """
    rows, width = scores_SV.shape
    flat = scores_SV.device.type == "cpu" and scores_SV.dtype == torch.float32 and scores_SV.stride(1) == 1
    if not (flat and width):
        best_S, ids_S = scores_SV.max(-1)
        return ids_S, best_S.isfinite()
    ids_S, finite_S = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    scores, stride = flat_rows(scores_SV)
    bits = scores.view(np.int32)
    _rows(scores_SV.numel(), rows, scores, bits, stride, width, array(ids_S), array(finite_S))
    return ids_S, finite_S
