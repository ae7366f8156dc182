"""View a tensor as rows, the input of elementwise and row-wise kernels; and slabs of rows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def rows_view(tensor: Tensor) -> Tensor:
    """[..., D] as [rows, D] with last stride 1.

    A view if strides allow (a block of columns of a wider buffer), else a copy.
    """
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def slabs(rows: int, row_bytes: int, at_most: int) -> Iterator[slice]:
    """Slices of `rows` rows, each of at most `at_most` bytes, but one row or more."""
    size = max(1, at_most // max(1, row_bytes))
    return (slice(first, first + size) for first in range(0, rows, size))
