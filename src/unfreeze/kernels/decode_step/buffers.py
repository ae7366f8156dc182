"""Buffers that the operations of a step read and write: a vector per sequence, and tensors of the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.decode_step.wide import tiles_of
from unfreeze.kernels.loops.amx_tile import SIDE


class Row:
    """A float32 vector per sequence, [S, width], and the same packed if a product reads it (rows.py)."""

    def __init__(self, tensor: Tensor, pairs: bool):
        self.tensor, self.width, self.pairs = tensor, tensor.shape[1], pairs
        self._packed: Tensor | None = None
        self.stale = True  # True until an operation writes the packed form with this value
        self._tiles: Tensor | None = None
        self.tiled = False  # True once an operation lays the packed form out in tiles

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def stride(self) -> int:
        return 4 * self.tensor.stride(0)

    @property
    def packed(self) -> Tensor:
        if self._packed is None:
            rows, width = self.tensor.shape
            size = SIDE * tiles_of(rows), width  # so many are laid out in tiles
            self._packed = torch.zeros(size, dtype=torch.int16 if self.pairs else torch.float32)[:rows]
        return self._packed

    @property
    def tiles(self) -> Tensor:
        """The packed form as the matrix unit reads it (wide.py)."""
        if self._tiles is None:
            self._tiles = torch.zeros(tiles_of(len(self.tensor)), self.width // 2, SIDE, dtype=torch.int32)
        return self._tiles

    def part(self, first: int, width: int) -> Row:
        """A view of `width` numbers of each sequence."""
        return Row(self.tensor[:, first : first + width], self.pairs)


class Store(NamedTuple):
    """A tensor of the cache: each row's own positions [S, N, …], and prompts that rows share [P, M, …]."""

    rows: Tensor
    prompts: Tensor | None = None


def memory_of(each: Row | Tensor) -> int:
    """The same number for all views of one buffer."""
    return (each.tensor if isinstance(each, Row) else each).untyped_storage().data_ptr()
