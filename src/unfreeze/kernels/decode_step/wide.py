"""Products of a step with many rows: by torch's GEMM, between two parts of the program.

The program's own loops read a matrix once and multiply row by row: the time of a few rows is that of reading.
A matrix unit (AMX) multiplies 16 rows at once, so from FROM rows on a GEMM is faster. Measured on a Xeon with
AMX, two cores, Qwen3-0.6B's shape in bf16, seconds of a step by loops and by GEMM: 4 rows .097 and .098,
8 rows .125 and .100, 16 rows .174 and .120, 32 rows .295 and .164, 64 rows .53 and .26.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.core.cpu import cpu_class
from unfreeze.kernels.decode_step.slots import SlotTable

FROM = {"cpu-amx": 6}
"""Class of CPU -> rows from which a GEMM computes the products of a bf16 matrix. Others: never."""


def wide_from(pairs: bool) -> int | None:
    """Rows from which products are a GEMM; None: never. pairs: the program multiplies in bf16."""
    return FROM.get(cpu_class()) if pairs else None


@dataclass(frozen=True)
class Product:
    """out = add + factor · (W x + bias + scale · B a), rounded to bf16 after W x and B a as in training.

    x [S, K] int16, the bits of bf16; W [O, K] bf16; out, add [S, O] and a [S, R] float32.
    adapter: (a, B, scale). each: (a, the rows' adapters, their slots), in place of one for all.
    """

    x: Tensor
    weight: Tensor
    out: Tensor
    bias: Tensor | None = None
    add: Tensor | None = None
    factor: float = 1.0
    adapter: tuple[Tensor, Tensor, float] | None = None
    each: tuple[Tensor, SlotTable, Tensor] | None = None

    def __call__(self, rows: int) -> None:
        y = self.x[:rows].view(torch.bfloat16) @ self.weight.T
        out = self.out[:rows]
        out.copy_(y)
        if self.bias is not None:
            out += self.bias
        if self.adapter is not None:
            low, B, scale = self.adapter
            out.addmm_(low[:rows], B.float().T, alpha=scale)
        if self.each is not None:
            low, table, slots = self.each
            table.add(out, low, slots[:rows].tolist())
        if self.factor != 1:
            out *= self.factor
        if self.add is not None:
            out += self.add[:rows]


Wide = tuple[int, Callable[[int], None]]
"""An operation's number, and what computes the same for many rows."""
