"""The CUDA part of the expert MLP: all experts at once, torch grouped GEMMs, offsets on the device, no host synchronisation.

Runs on CPU too (bf16), which is how it is tested; speed on a GPU is not measured yet. Sorting, gathering and SwiGLU are the ops token_order and
swiglu, by record. torch's grouped GEMM has no `out`: what stands in a wider buffer is copied there, the rest is taken as it comes.

n = T * K rows sorted by expert, E experts, D, I, Q, P as in factors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels import int4_grouped_mm, swiglu, token_order
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.expert_mlp.by_gemms import ByGemms
from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.expert_mlp.few_cuda import few_rows
from unfreeze.quant.codec import Packed


@dataclass(frozen=True)
class Group:
    """All experts and all rows of a call."""

    routing: Routing
    experts: list[int]

    @property
    def positions(self) -> slice:
        return slice(0, len(self.experts))

    @property
    def rows(self) -> slice:
        return slice(0, self.num_rows)

    @property
    def num_rows(self) -> int:
        return self.routing.num_rows

    @property
    def weight(self) -> Tensor:
        return self.routing.weight_n


@dataclass(frozen=True)
class Routing:
    """Rows sorted by expert: slot_n int64 (row r is slot t K + k), weight_n float32, row_of_slot int64 [T K], offsets_E int32 where each expert's
    rows end. `order` is the implementation of token_order that made it."""

    slot_n: Tensor
    weight_n: Tensor
    row_of_slot: Tensor
    offsets_E: Tensor
    num_experts: int
    per_token: int
    order: Any

    @property
    def experts(self) -> list[int]:
        return list(range(self.num_experts))

    @cached_property
    def token_n(self) -> Tensor:
        """Which token a row is of."""
        return torch.div(self.slot_n, self.per_token, rounding_mode="floor")

    @property
    def num_rows(self) -> int:
        return self.slot_n.numel()

    def selection(self) -> None:
        """All experts: which of them have rows is known on the device only."""
        return None


MADE = ("y", "dh")  # of these fused uses what nt and nn return: at 65,536 rows of 7,168 a copy of y would move 1.9 GB


class Grouped(ByGemms):
    """The part that `fused` is given on CUDA. bf16; D and I multiples of 8 (16-byte strides). Ids are not checked: that would synchronise."""

    def route(self, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, dtype: torch.dtype) -> Routing:
        order = choose(token_order.OP, ids_TK.device, dtype, token_order.bucket(ids_TK, ids_TK, weights_TK, num_experts)).part
        slot_n, row_of_slot, offsets_E = order.sort(ids_TK.detach(), num_experts)
        weight_n = weights_TK.detach().float().reshape(-1)[slot_n]
        return Routing(slot_n, weight_n, row_of_slot, offsets_E, num_experts, ids_TK.shape[1], order)

    def groups(self, routing: Routing, weight_bytes: int, row_bytes: int) -> Iterator[Group]:
        """One group: cutting the rows would need their counts on the host. Its workspace holds weight_bytes per expert."""
        yield Group(routing, routing.experts)

    def few(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor | Packed, down: Tensor | Packed, factors: ExpertFactors
    ) -> Tensor | None:
        """The result, without gradients, where a record says that multiplying with the codes beats expanding them; else None."""
        if not (isinstance(gate_up, Packed) and isinstance(down, Packed)):
            return None
        rows = x_TD.new_empty((1, 1)).expand(ids_TK.numel(), 1)  # only how many they are matters
        if any(int4_grouped_mm.expands(rows, base, ids_TK) for base in (gate_up, down)):
            return None
        return few_rows(x_TD, self, self.route(ids_TK, weights_TK, gate_up.shape[0], x_TD.dtype), gate_up, down, factors)

    def workers(self, routing: Routing, width: int) -> int:
        """One: the device shares the work out itself."""
        return 1

    def each(self, groups: Iterator[Group], workers: int, work: Callable[[Group, int], None]) -> None:
        for group in groups:
            work(group, 0)

    def rows(self, name: str, group: Group, width: int, dtype: torch.dtype) -> Any:
        """Uninitialised [n, width], the caching allocator being the scratch here; None for what a GEMM makes itself."""
        return None if name in MADE else torch.empty((group.num_rows, width), dtype=dtype, device=group.weight.device)

    def nt(self, a: Tensor, weights: Tensor, index: object, group: Group, out: Tensor | None) -> Tensor:
        """a[rows of e] @ weights[e]ᵀ, in `out` where there is one; weights [E, N, M]."""
        return self.nn(a, weights.transpose(1, 2), index, group, out)

    def nn(self, a: Tensor, weights: Tensor, index: object, group: Group, out: Tensor | None) -> Tensor:
        """a[rows of e] @ weights[e], in `out` where there is one; weights [E, N, M]."""
        made = F.grouped_mm(a, weights, offs=group.routing.offsets_E)
        return made if out is None else out.copy_(made)

    def tn(self, a: Tensor, b: Tensor, group: Group, out: Tensor, index: object) -> None:
        """out[e] = a[rows of e]ᵀ @ b[rows of e]; zero for an expert without rows."""
        out.copy_(F.grouped_mm(a.t(), b, offs=group.routing.offsets_E))

    def gather(self, source: Tensor, group: Group, out: Tensor) -> None:
        group.routing.order.gather(source, group.routing.slot_n, group.routing.per_token, out)

    def scatter_add(self, rows: Tensor, group: Group, weight: Tensor, out: Tensor) -> None:
        """By gathering each token's K rows, not by atomic adds: the same bits at every run."""
        group.routing.order.combine(rows, group.routing.row_of_slot, weight, out)

    def swiglu(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        swiglu.part_for(gate_up).forward(gate, up, out[:, : gate.shape[1]])

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor, group: Group, weighted: Tensor, grad_gate_up: Tensor, score: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        width = gate.shape[1]
        dgate, dup = grad_gate_up[:, :width], grad_gate_up[:, width : 2 * width]
        swiglu.part_for(gate_up).backward_weighted(grad, gate, up, group.weight, weighted, dgate, dup, score)
