"""Grouped matrix products by torch: the oracle; it runs on a CPU and on cards of capability 9 and 10."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED = (torch.bfloat16, torch.float16, torch.float32)  # dtypes that F.grouped_mm takes


def grouped_mm(a: Tensor, b: Tensor, offsets_E: Tensor, out: Tensor | None = None) -> Tensor:
    """As kernels.grouped_mm. In float64, which torch's does not take, one product an expert."""
    product = F.grouped_mm(a, b, offs=offsets_E) if a.dtype in GROUPED else _each(a, b, offsets_E)
    return product if out is None else out.copy_(product)


def _each(a: Tensor, b: Tensor, offsets_E: Tensor) -> Tensor:
    ends = offsets_E.tolist()
    pieces = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if b.dim() == 2:
        return torch.stack([a[:, rows] @ b[rows] for rows in pieces])
    rest = a.new_zeros((len(a) - ends[-1], b.shape[2]))
    return torch.cat([*(a[rows] @ matrix for rows, matrix in zip(pieces, b, strict=True)), rest])
