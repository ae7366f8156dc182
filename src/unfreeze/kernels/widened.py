"""Products with a matrix held in fewer bits than the computation: bf16 weights under float32.

A CPU without bf16 units multiplies bf16 some hundred times slower than float32. So one panel of W at a time
is converted into a scratch buffer that stays in cache, multiplied, and overwritten by the next. W itself
stays as in its file: a model takes no more memory than its files. The conversion is exact, so the result is
that of a float32 copy of W.

T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unfreeze.kernels.loops.scratch import scratch

PANEL = 1 << 20
"""Elements of a panel, 4 MiB in float32: it fits the L2 cache or a shared L3."""


def times_transposed(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """y = x Wᵀ in x's dtype: x [..., I], W [O, I] in another dtype -> y [..., O]. Without gradient."""
    rows_TI = x_TI.reshape(-1, x_TI.shape[-1])
    y_TO = rows_TI.new_empty(len(rows_TI), len(weight_OI))
    for outputs, panel_PI in _panels(weight_OI, x_TI.dtype):
        torch.mm(rows_TI, panel_PI.t(), out=y_TO[:, outputs])
    return y_TO.view(*x_TI.shape[:-1], len(weight_OI))


def times(dy_TO: Tensor, weight_OI: Tensor) -> Tensor:
    """dx = dy W in dy's dtype: dy [..., O], W [O, I] in another dtype -> dx [..., I]. Without gradient."""
    rows_TO = dy_TO.reshape(-1, dy_TO.shape[-1])
    dx_TI = rows_TO.new_empty(len(rows_TO), weight_OI.shape[1])
    for outputs, panel_PI in _panels(weight_OI, dy_TO.dtype):
        torch.addmm(dx_TI, rows_TO[:, outputs], panel_PI, beta=0 if outputs.start == 0 else 1, out=dx_TI)
    return dx_TI.view(*dy_TO.shape[:-1], weight_OI.shape[1])


def panel_bytes(weight_OI: Tensor, dtype: torch.dtype) -> int:
    """Bytes of the scratch for products with W in `dtype`; 0 if W already has that dtype."""
    if weight_OI.dtype == dtype:
        return 0
    return _rows(weight_OI) * weight_OI.shape[1] * dtype.itemsize


def _panels(weight_OI: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of outputs, their rows of W in `dtype`), each in the same memory."""
    rows, (outputs, inputs) = _rows(weight_OI), weight_OI.shape
    for first in range(0, outputs, rows):
        here = slice(first, min(first + rows, outputs))
        panel_PI = scratch("panel of a weight", (here.stop - first, inputs), dtype, weight_OI.device)
        yield here, panel_PI.copy_(weight_OI[here])


def _rows(weight_OI: Tensor) -> int:
    """Rows of W in a panel: as many as fit, divided evenly."""
    outputs, inputs = weight_OI.shape
    count = -(-outputs * inputs // PANEL)
    return -(-outputs // max(1, count))
