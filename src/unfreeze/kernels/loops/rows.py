"""View a tensor as rows, the input of elementwise and row-wise kernels."""

from __future__ import annotations

from torch import Tensor


def rows_view(tensor: Tensor) -> Tensor:
    """[..., D] as [rows, D] with last stride 1.

    A view if strides allow (a block of columns of a wider buffer), else a copy.
    """
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
