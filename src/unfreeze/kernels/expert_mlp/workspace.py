"""The base weights in the form a GEMM takes.

The workspace of a matrix W [N, M] with adapter A [Q, M], B [N, Q] is  WS [N + Q, M + Q] = [[W, B], [A, unused]]:
    forward   y  = [x | x Aᵀ]   WS[:N, :]ᵀ  =  x Wᵀ + x Aᵀ Bᵀ
    backward  dx = [dy | dy B]  WS[:, :M]   =  dy W + dy B A
base and adapter in one GEMM per direction. Each direction writes only the factor that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp.factors import Adapter
from unfreeze.kernels.int4_expand import expand_stack
from unfreeze.kernels.loops.scratch import scratch
from unfreeze.quant.codec import Packed

Direction = Literal["forward", "backward"]


class Base:
    """One base weight, packed or dense [E, N, M], for the length of a call. `Base.stack` gives matrices as one 3-D tensor."""

    def __init__(self, weight: Tensor | Packed, dtype: torch.dtype, name: str):
        self.weight, self.dtype, self.name = weight, dtype, name
        _, self.rows, self.columns = weight.shape
        self._expander = None
        if isinstance(weight, Packed) and weight.device.type == "cpu":
            from unfreeze.kernels.int4_expand import numba_cpu  # only the CPU needs numba

            self._expander = numba_cpu.Expander(weight) if numba_cpu.expandable(weight) else None

    @property
    def codes(self) -> tuple[np.ndarray, np.ndarray, int]:
        """(codes uint8 [E, N, M / 2], scales as bf16 bits [E, N, groups], bytes of a group) of an INT4 weight on CPU."""
        if self._expander is None:
            raise ValueError(f"{self.name} is not an INT4 weight that the loops of a CPU read")
        return self._expander.codes, self._expander.scales, self._expander.half

    def nbytes(self, adapter: Adapter | None) -> int:
        """Bytes of one matrix with its adapter in the workspace."""
        width = adapter.width if adapter else 0
        return (self.rows + width) * (self.columns + width) * self.dtype.itemsize

    def direct(self, adapter: Adapter | None) -> bool:
        """Whether the weight can be used where it lies: dense, of the computation's dtype, and nothing to stand beside it."""
        return adapter is None and isinstance(self.weight, Tensor) and self.weight.dtype == self.dtype

    def stack(self, experts: Sequence[int], positions: slice, adapter: Adapter | None, direction: Direction) -> Tensor:
        """WS [len(experts), N + Q, M + Q] for `experts`, which lie at `positions` of the adapter. Valid until the next stack of this name."""
        width = adapter.width if adapter else 0
        device = self.weight.device
        space = scratch(self.name, (len(experts), self.rows + width, self.columns + width), self.dtype, device)
        self._fill(experts, space[:, : self.rows, : self.columns])
        if adapter and direction == "forward":
            space[:, : self.rows, self.columns :].copy_(adapter.B[positions])
        elif adapter:
            space[:, self.rows :, : self.columns].copy_(adapter.A[positions])
        return space

    def _fill(self, experts: Sequence[int], out: Tensor) -> None:
        if self._expander is not None:
            self._expander.fill(experts, out)
            return
        if isinstance(self.weight, Packed):
            expand_stack(self.weight, experts, out)
        elif len(experts) == len(self.weight):
            out.copy_(self.weight)
        else:
            for position, expert in enumerate(experts):
                out[position].copy_(self.weight[expert])
