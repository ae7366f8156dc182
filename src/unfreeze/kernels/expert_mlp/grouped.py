"""The CUDA part of the expert MLP: all experts at once, torch grouped GEMMs, offsets on the device, no host synchronisation.

Runs on CPU too (bf16), which is how it is tested; speed on a GPU is not measured yet. Elementwise work is plain torch, and results are copied
once into place, as torch's grouped GEMM has no `out`.

n = T * K rows sorted by expert, E experts, D, I, Q, P as in factors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """All experts and all rows. offsets_E int32: where each expert's rows end."""

    experts: list[int]
    positions: slice
    rows: slice
    offsets_E: Tensor
    token: Tensor
    weight: Tensor
    row_of_slot: Tensor

    @property
    def num_rows(self) -> int:
        return self.token.numel()


@dataclass(frozen=True)
class Routing:
    """Rows sorted by expert: token_n int64, weight_n float32, row_of_slot int64 [T * K], offsets_E int32."""

    token_n: Tensor
    weight_n: Tensor
    row_of_slot: Tensor
    offsets_E: Tensor
    num_experts: int

    @property
    def experts(self) -> list[int]:
        return list(range(self.num_experts))

    @property
    def num_rows(self) -> int:
        return self.token_n.numel()

    def selection(self) -> None:
        """All experts: which of them have rows is known on the device only."""
        return None


class Grouped:
    """The part that `fused` is given on CUDA. bf16; D and I multiples of 8 (16-byte strides). Ids are not checked: that would synchronise."""

    def route(self, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, dtype: torch.dtype) -> Routing:
        ids = ids_TK.detach().reshape(-1)
        slot_n = torch.argsort(ids, stable=True)
        row_of_slot = torch.empty_like(slot_n)
        row_of_slot[slot_n] = torch.arange(slot_n.numel(), device=ids.device)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
        weight_n = weights_TK.detach().float().reshape(-1)[slot_n]
        token_n = torch.div(slot_n, ids_TK.shape[1], rounding_mode="floor")
        return Routing(token_n, weight_n, row_of_slot, counts.cumsum(0).to(torch.int32), num_experts)

    def groups(self, routing: Routing, weight_bytes: int, row_bytes: int) -> Iterator[Group]:
        """One group: cutting the rows would need their counts on the host. Its workspace holds weight_bytes per expert."""
        every = (routing.experts, slice(0, routing.num_experts), slice(0, routing.num_rows))
        yield Group(*every, routing.offsets_E, routing.token_n, routing.weight_n, routing.row_of_slot)

    def few(self, *call: object) -> None:
        """No path of its own for a handful of tokens."""

    def workers(self, routing: Routing, width: int) -> int:
        """One: the device shares the work out itself."""
        return 1

    def each(self, groups: Iterator[Group], workers: int, work: Callable[[Group, int], None]) -> None:
        for group in groups:
            work(group, 0)

    def rows(self, name: str, group: Group, width: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [n, width]; the caching allocator is the scratch here."""
        return torch.empty((group.num_rows, width), dtype=dtype, device=group.token.device)

    def nt(self, a: Tensor, weights: Tensor, index: object, group: Group, out: Tensor) -> Tensor:
        """out[rows of e] = a[rows of e] @ weights[e]ᵀ; weights [E, N, M]."""
        return out.copy_(F.grouped_mm(a, weights.transpose(1, 2), offs=group.offsets_E))

    def nn(self, a: Tensor, weights: Tensor, index: object, group: Group, out: Tensor) -> Tensor:
        """out[rows of e] = a[rows of e] @ weights[e]; weights [E, N, M]."""
        return out.copy_(F.grouped_mm(a, weights, offs=group.offsets_E))

    def tn(self, a: Tensor, b: Tensor, group: Group, out: Tensor, index: object) -> None:
        """out[e] = a[rows of e]ᵀ @ b[rows of e]; zero for an expert without rows."""
        out.copy_(F.grouped_mm(a.t(), b, offs=group.offsets_E))

    def gather(self, source: Tensor, group: Group, out: Tensor) -> None:
        out[:, : source.shape[1]] = source.index_select(0, group.token)

    def scatter_add(self, rows: Tensor, group: Group, weight: Tensor, out: Tensor) -> None:
        """By gathering each token's K rows, not by atomic adds: the same bits at every run."""
        by_slot = rows.index_select(0, group.row_of_slot).float() * weight[group.row_of_slot, None]
        out.add_(by_slot.view(out.shape[0], -1, out.shape[1]).sum(dim=1))

    def swiglu(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.float().chunk(2, dim=-1)
        out[:, : gate.shape[1]] = F.silu(gate) * up

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor, group: Group, weighted: Tensor, grad_gate_up: Tensor, score: Tensor) -> None:
        """As numba_kernels.swiglu_backward."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        silu, dh, weight = gate * sigmoid, grad.float(), group.weight[:, None]
        h, width = silu * up, gate.shape[1]
        weighted.copy_(weight * h)
        score.copy_((dh * h).sum(dim=-1))
        grad_gate_up[:, :width] = weight * dh * up * (sigmoid + silu * (1 - sigmoid))
        grad_gate_up[:, width : 2 * width] = weight * dh * silu
