"""The CPU backend of the expert MLP: experts in groups that stay in cache, a torch.mm per expert.

numba loops do the work around the GEMMs. n rows (a token at one expert, sorted by expert, each expert's rows
padded), D, I, Q, P as in factors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp import decode_cpu, numba_kernels, thin_cpu
from unfreeze.kernels.expert_mlp.backend import ExpertGroup, HostRouting
from unfreeze.kernels.expert_mlp.by_gemms import ByGemms
from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.expert_mlp.workspace import GROUP_BYTES
from unfreeze.kernels.loops.cores import spread
from unfreeze.kernels.loops.numba_options import array
from unfreeze.kernels.loops.scratch import scratch
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation
from unfreeze.quant.codec import Packed

# multiply-adds from which a call is divided among cores; less work is not worth handing out
WORKERS_FROM = 1 << 26

HostGroup = ExpertGroup[HostRouting]


def padded_rows(rows: int, dtype: torch.dtype) -> int:
    """Rows of a GEMM for `rows`, including padding. float32: no padding.

    bf16: oneDNN compiles one kernel per row count and caches 1,024 of them (0.7 ms and up to 0.5 MB each). So
    only few counts are used: powers of two up to 16, then multiples of 16 or more, at most 8 from a power of
    two to the next.
    """
    if dtype != torch.bfloat16 or rows == 0:
        return rows
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    step = max(16, 1 << max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step


class LoopCpu(ByGemms[HostRouting]):
    """The backend of `fused` on CPU. bf16 or float32."""

    def route(self, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, dtype: torch.dtype) -> HostRouting:
        """Sort the slots by expert. Raises IndexError for an id that is not an expert."""
        ids = ids_TK.detach().contiguous().view(-1).numpy()
        weights = weights_TK.detach().float().contiguous().view(-1).numpy()

        # Count the rows of each expert.
        counts = np.zeros(num_experts, np.int64)
        wrong = numba_kernels.count_experts(ids, counts)
        if wrong != -1:
            raise IndexError(f"expert id {ids[wrong]} outside 0..{num_experts - 1}")

        # Pad them; an expert's rows start where those of the previous expert stop.
        experts = np.flatnonzero(counts).tolist()
        sizes = [self.padded(rows, dtype) for rows in counts[experts].tolist()]
        begins = np.zeros(num_experts, np.int64)
        begins[experts] = np.cumsum([0, *sizes[:-1]]) if experts else 0

        # Give each slot the next row of its expert.
        token = np.full(sum(sizes), -1, np.int32)
        weight = np.zeros(sum(sizes), np.float32)
        row = np.empty(ids.size, np.int64)
        if experts:
            numba_kernels.place_rows(ids, weights, ids_TK.shape[1], begins, token, weight, row)
        return HostRouting(
            num_experts,
            experts,
            weight_n=torch.from_numpy(weight),
            row_of_slot=torch.from_numpy(row),
            sizes=sizes,
            token_n=torch.from_numpy(token),
        )

    def padded(self, rows: int, dtype: torch.dtype) -> int:
        """Rows of an expert for `rows`, including padding."""
        return padded_rows(rows, dtype)

    def groups(
        self, routing: HostRouting, weight_bytes: tuple[int, int], row_bytes: int, *, both: bool
    ) -> Iterator[HostGroup]:
        """Consecutive experts up to GROUP_BYTES; always at least one."""
        first = begin = cost = rows = 0
        weights = sum(weight_bytes) if both else max(weight_bytes)
        for position, size in enumerate(routing.sizes):
            more = weights + size * row_bytes
            if position > first and cost + more > GROUP_BYTES:
                yield ExpertGroup(routing, slice(first, position), slice(begin, begin + rows))
                first, begin, cost, rows = position, begin + rows, 0, 0
            cost, rows = cost + more, rows + size
        if routing.sizes:
            yield ExpertGroup(routing, slice(first, len(routing.sizes)), slice(begin, begin + rows))

    def decode(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor | Packed,
        down: Tensor | Packed,
        factors: ExpertFactors,
    ) -> Tensor | None:
        if not (isinstance(gate_up, Packed) and isinstance(down, Packed)):
            return None
        if ids_TK.numel() > decode_cpu.ROWS_PER_EXPERT * gate_up.shape[0]:
            return None
        routing = LoopCpu().route(ids_TK, weights_TK, gate_up.shape[0], torch.float32)  # without padding
        if not decode_cpu.supports(routing, gate_up, down):
            return None
        return decode_cpu.decode(x_TD, routing, gate_up, down, factors)

    def workers(self, routing: HostRouting, weights: int) -> int:
        if routing.num_rows * weights < WORKERS_FROM:
            return 1
        return min(torch.get_num_threads(), len(routing.experts))

    def each(self, groups: Iterator[HostGroup], workers: int, work: Callable[[HostGroup, int], None]) -> None:
        """Give each worker, one per core, its own run of consecutive groups, the same at every call.

        Its sums have a fixed order, so a repeated step is bit-identical.
        """
        listed = list(groups)
        spread([listed] if workers == 1 else _shares(listed, workers), work)

    def rows(self, name: str, group: HostGroup, columns: int, dtype: torch.dtype) -> Tensor:
        return scratch(name, (group.num_rows, columns), dtype, group.weight.device)

    def product_rows(self, name: str, group: HostGroup, columns: int, dtype: torch.dtype) -> Tensor:
        return self.rows(name, group, columns, dtype)

    def nt(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: HostGroup, out: Tensor | None
    ) -> Tensor:
        assert out is not None  # product_rows allocated it
        sizes = group_sizes(group)
        for i, a_rows, out_rows in zip(index, a.split(sizes), out.split(sizes), strict=True):
            if not thin_cpu.dots(a_rows, weights.select(0, i), out_rows):
                torch.mm(a_rows, weights.select(0, i).t(), out=out_rows)
        return out

    def nn(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: HostGroup, out: Tensor | None
    ) -> Tensor:
        return self.nt(a, weights.transpose(1, 2), index, group, out)

    def tn(self, a: Tensor, b: Tensor, group: HostGroup, out: Tensor, index: Sequence[int]) -> None:
        sizes = group_sizes(group)
        for i, a_rows, b_rows in zip(index, a.split(sizes), b.split(sizes), strict=True):
            if out.dtype == a.dtype:
                torch.mm(a_rows.t(), b_rows, out=out.select(0, i))
            elif not thin_cpu.outer(a_rows, b_rows, out.select(0, i)):
                out.select(0, i).copy_(torch.mm(a_rows.t(), b_rows))

    def gather(self, source: Tensor, group: HostGroup, out: Tensor) -> None:
        token = array(group.routing.token_n[group.rows])
        numba_kernels.gather(group.num_rows * source.shape[1], token.size, array(source), token, array(out))

    def scatter_add(self, rows: Tensor, group: HostGroup, weight: Tensor | None, out: Tensor) -> None:
        weight = torch.ones_like(group.weight) if weight is None else weight
        token = array(group.routing.token_n[group.rows])
        columns = rows.shape[1]
        numba_kernels.scatter_add(rows.numel(), columns, array(rows), token, array(weight), array(out))

    def bias(self, biases: Tensor, group: HostGroup, out: Tensor) -> None:
        for expert, rows in zip(group.experts, out.split(group_sizes(group)), strict=True):
            rows += biases[expert]

    def sums(self, rows: Tensor, group: HostGroup, out: Tensor) -> None:
        for expert, of_expert in zip(group.experts, rows.split(group_sizes(group)), strict=True):
            out[expert] += of_expert.sum(0, dtype=torch.float32)

    def activate(self, activation: Activation, gate_up: Tensor, group: HostGroup, out: Tensor) -> None:
        """A loop for SwiGLU of halves, else as in ByGemms."""
        if activation != SWIGLU:
            super().activate(activation, gate_up, group, out)
            return
        numba_kernels.swiglu(gate_up.numel(), len(gate_up), array(gate_up), array(out))

    def activate_backward(
        self,
        activation: Activation,
        grad: Tensor,
        gate_up: Tensor,
        group: HostGroup,
        weighted: Tensor,
        grad_gate_up: Tensor,
        score: Tensor,
    ) -> None:
        if activation != SWIGLU:
            super().activate_backward(activation, grad, gate_up, group, weighted, grad_gate_up, score)
            return
        arrays = (array(t) for t in (grad, gate_up, group.weight, weighted, grad_gate_up, score))
        numba_kernels.swiglu_backward(gate_up.numel(), len(gate_up), *arrays)


def group_sizes(group: HostGroup) -> list[int]:
    """Rows of each of the group's experts, padding included."""
    return group.routing.sizes[group.positions]


def _shares(groups: list[HostGroup], workers: int) -> list[list[HostGroup]]:
    """Divide the groups into runs of consecutive ones with about the same work.

    The work of an expert is its rows, plus 48 for expanding its weights (measured, INT4).
    """
    costs = np.cumsum([group.num_rows + 48 * len(group.experts) for group in groups])
    cuts = np.searchsorted(costs, costs[-1] * np.arange(1, workers) / workers).tolist()
    return [groups[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(groups)], strict=True)]
