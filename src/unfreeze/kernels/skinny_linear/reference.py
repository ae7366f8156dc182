"""Few rows by torch: the oracle and the fallback of the op."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.widened import times_transposed


def reference(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """y = x Wᵀ + b; if W has another dtype than x, it is widened by panels."""
    if x_TI.dtype == weight_OI.dtype:
        return F.linear(x_TI, weight_OI, bias_O)
    y_TO = times_transposed(x_TI, weight_OI)
    return y_TO if bias_O is None else y_TO + bias_O
