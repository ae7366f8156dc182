"""Few rows on CPU: each row of W is read once, widened in registers and multiplied with all rows of x.

By kernels/loops/row_dots.py. One row costs the time of reading W; each further one adds its float32
multiplications, and from four on oneDNN's bf16 GEMM is faster. Record: few_rows in kernels/records/
(`unfreeze kernels list --op few_rows`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.loops.numba_options import Kernel, array, narrow, widen
from unfreeze.kernels.loops.row_dots import bf16_row, halves, row_dots
from unfreeze.kernels.skinny_linear.reference import reference

JOB_ROWS = 16  # weight rows of a job


@Kernel
def _linear(start, stop, x, weight, bias, y):
    """weight [out, in] bf16 bits; x [T, in], y [T, out] and bias [out] (or empty) bf16 bits or float32."""
    order, wide = np.arange(x.shape[0]), np.empty(x.shape, np.float32)
    halves(x, wide)
    for job in range(start, stop):
        sums = np.empty(order.size, np.float32)
        for o in range(job * JOB_ROWS, min(job * JOB_ROWS + JOB_ROWS, weight.shape[0])):
            row_dots(bf16_row(weight[o]), wide, order, sums)
            shift = widen(bias[o]) if bias.size else np.float32(0.0)
            for t in range(order.size):
                y[t, o] = narrow(np.float32(sums[t] + shift), y[t, o])


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """As skinny_linear.

    A width that is not a multiple of 32, or a weight that is not row-contiguous, is left to torch.
    """
    if weight_OI.shape[1] % 32 or weight_OI.stride() != (weight_OI.shape[1], 1):
        return reference(x_TI, weight_OI, bias_O)
    y = torch.empty((x_TI.shape[0], weight_OI.shape[0]), dtype=x_TI.dtype)
    bias = array(x_TI.new_empty(0) if bias_O is None else bias_O)
    jobs = -(-weight_OI.shape[0] // JOB_ROWS)
    _linear(x_TI.shape[0] * weight_OI.numel(), jobs, array(x_TI), array(weight_OI), bias, array(y))
    return y
