"""The adapters of one matrix by slot, as the operations read them (thin.py), and as torch does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.decode_step.thin import ENTRY

NONE = -1
"""The slot of a sequence without an adapter."""


class Factors(NamedTuple):
    """scale · B A: A [R, K] and B [O, R], float32; stacks have E in front, up's rows of A behind gate's."""

    A: Tensor
    B: Tensor
    scale: float


class SlotTable:
    """The factors of each slot, and the table of their addresses.

    A program keeps `entries`, so a slot may be filled or emptied between its steps.
    """

    def __init__(self, slots: int):
        self.entries = torch.zeros(slots, ENTRY // 8, dtype=torch.int64)
        self.factors: dict[int, Factors] = {}
        self.rank = 0  # the greatest so far

    def put(self, slot: int, factors: Factors) -> bool:
        """Fill a slot. -> True if a program has no place for it: more slots, or a greater rank.

        Raises ValueError for factors that the operations cannot read.
        """
        A, B, scale = factors
        for factor in (A, B):
            if factor.dtype != torch.float32 or not factor.is_contiguous():
                raise ValueError(f"a factor of {factor.dtype}, strides {factor.stride()}; float32 in order")
        new = slot >= len(self.entries) or B.shape[-1] > self.rank
        if slot >= len(self.entries):
            entries = torch.zeros(max(2 * len(self.entries), slot + 1), ENTRY // 8, dtype=torch.int64)
            entries[: len(self.entries)] = self.entries
            self.entries = entries
        self.rank = max(self.rank, B.shape[-1])
        self.factors[slot] = factors
        bits = int(np.float32(scale).view(np.uint32))
        self.entries[slot] = torch.tensor([A.data_ptr(), B.data_ptr(), B.shape[-1], bits])
        return new

    def take(self, slot: int) -> None:
        """Empty a slot, which no sequence has."""
        if self.factors.pop(slot, None) is not None:
            self.entries[slot] = 0
