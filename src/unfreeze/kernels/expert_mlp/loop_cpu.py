"""The CPU part of the expert MLP: experts in groups that stay in cache, a torch.mm per expert, numba loops around them.

n rows (a token at one expert, sorted by expert, each expert's rows padded), G experts of a group, D, I, Q, P as in factors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp import numba_kernels, thin_cpu
from unfreeze.kernels.expert_mlp.by_gemms import ByGemms
from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.loops.cores import spread
from unfreeze.kernels.loops.numba_options import array, set_threads
from unfreeze.kernels.loops.scratch import scratch
from unfreeze.quant.codec import Packed

GROUP_BYTES = 4 << 20  # weights and rows of a group: what a core's L2 and its share of L3 hold
WORKERS_FROM = 1 << 26  # multiply-adds of a call from which it is shared among cores: 0.3 ms of work, against 0.1 ms to hand it out


@dataclass(frozen=True)
class Group:
    """Some experts and their rows. `positions` is where they stand among the experts in use, `begin` their first row."""

    experts: list[int]
    positions: slice
    begin: int
    sizes: list[int]
    token: Tensor
    weight: Tensor

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + self.num_rows)

    @property
    def num_rows(self) -> int:
        return self.token.numel()


@dataclass(frozen=True)
class Routing:
    """Rows sorted by expert. token_n int32 (-1 padding), weight_n float32, row_of_slot int64 [T * K], experts in use and their padded rows."""

    token_n: Tensor
    weight_n: Tensor
    row_of_slot: Tensor
    experts: list[int]
    sizes: list[int]
    num_experts: int

    @property
    def num_rows(self) -> int:
        return self.token_n.numel()

    def selection(self) -> Tensor | None:
        """Index of the experts in use, None where all are."""
        return None if len(self.experts) == self.num_experts else torch.tensor(self.experts, dtype=torch.int64)


def padded_rows(rows: int, dtype: torch.dtype) -> int:
    """How many rows a GEMM gets for `rows`, padding included. float32: no padding.

    bf16: oneDNN compiles one kernel per row count and keeps 1,024 of them (0.7 ms and up to 0.5 MB each). So
    there are few counts: powers of two up to 16, then multiples of 16 or more, at most 8 from a power of two
    to the next.
    """
    if dtype != torch.bfloat16 or rows == 0:
        return rows
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    step = max(16, 1 << max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step


class LoopCpu(ByGemms):
    """The part that `fused` is given on CPU. bf16 or float32."""

    def route(self, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, dtype: torch.dtype) -> Routing:
        """Counts, padded offsets, rows. Raises IndexError where an id is not an expert."""
        ids = ids_TK.detach().contiguous().view(-1).numpy()
        weights = weights_TK.detach().float().contiguous().view(-1).numpy()
        counts = np.zeros(num_experts, np.int64)
        wrong = numba_kernels.count_experts(ids, counts)
        if wrong != -1:
            raise IndexError(f"expert id {ids[wrong]} outside 0..{num_experts - 1}")
        experts = np.flatnonzero(counts).tolist()
        sizes = [self.padded(rows, dtype) for rows in counts[experts].tolist()]
        begins = np.zeros(num_experts, np.int64)
        begins[experts] = np.cumsum([0, *sizes[:-1]]) if experts else 0
        total = sum(sizes)
        token, weight, row = np.full(total, -1, np.int32), np.zeros(total, np.float32), np.empty(ids.size, np.int64)
        if experts:
            numba_kernels.place_rows(ids, weights, ids_TK.shape[1], begins, token, weight, row)
        return Routing(torch.from_numpy(token), torch.from_numpy(weight), torch.from_numpy(row), experts, sizes, num_experts)

    def padded(self, rows: int, dtype: torch.dtype) -> int:
        """How many rows an expert gets for `rows`."""
        return padded_rows(rows, dtype)

    def group(self, routing: Routing, span: slice, begin: int, rows: int) -> Group:
        """The experts in use at `span`, whose `rows` rows begin at `begin`."""
        where = slice(begin, begin + rows)
        return Group(routing.experts[span], span, begin, routing.sizes[span], routing.token_n[where], routing.weight_n[where])

    def groups(self, routing: Routing, weight_bytes: int, row_bytes: int) -> Iterator[Group]:
        """Consecutive experts up to GROUP_BYTES; always at least one."""
        first = begin = held = rows = 0
        for position, size in enumerate([*routing.sizes, None]):
            cost = 0 if size is None else weight_bytes + size * row_bytes
            if position > first and (size is None or held + cost > GROUP_BYTES):
                yield self.group(routing, slice(first, position), begin, rows)
                first, begin, held, rows = position, begin + rows, 0, 0
            held, rows = held + cost, rows + (size or 0)

    def few(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor | Packed, down: Tensor | Packed, factors: ExpertFactors
    ) -> Tensor | None:
        """The result, without gradients, where so few tokens ask that expanding whole experts for GEMMs would cost more; else None."""
        from unfreeze.kernels.expert_mlp import decode_cpu  # which needs this file's Routing

        if not (isinstance(gate_up, Packed) and isinstance(down, Packed)) or ids_TK.numel() > decode_cpu.ROWS_PER_EXPERT * gate_up.shape[0]:
            return None
        routing = self.route(ids_TK, weights_TK, gate_up.shape[0], torch.float32)
        return decode_cpu.decode(x_TD, routing, gate_up, down, factors) if decode_cpu.suits(routing, gate_up, down) else None

    def workers(self, routing: Routing, width: int) -> int:
        """How many cores share a call whose experts have `width` weights each."""
        return 1 if routing.num_rows * width < WORKERS_FROM else min(torch.get_num_threads(), len(routing.experts))

    def each(self, groups: Iterator[Group], workers: int, work: Callable[[Group, int], None]) -> None:
        """work(group, worker) for every group. Each worker is a core with its own run of consecutive groups, the same at every call: what it
        sums up has a fixed order, so a repeated step has the same bits."""
        listed = list(groups)
        spread([listed] if workers == 1 else _shares(listed, workers), work)

    def rows(self, name: str, group: Group, width: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [rows of the group, width]."""
        return scratch(name, (group.num_rows, width), dtype, group.token.device)

    def nt(self, a: Tensor, weights: Tensor, index: list[int] | range, group: Group, out: Tensor) -> Tensor:
        """out[rows of g] = a[rows of g] @ weights[index[g]]ᵀ. weights [., N, M], a [rows, M], out [rows, N]."""
        for i, a_rows, out_rows in zip(index, a.split(group.sizes), out.split(group.sizes), strict=True):
            if not thin_cpu.dots(a_rows, weights.select(0, i), out_rows):
                torch.mm(a_rows, weights.select(0, i).t(), out=out_rows)
        return out

    def nn(self, a: Tensor, weights: Tensor, index: list[int] | range, group: Group, out: Tensor) -> Tensor:
        """out[rows of g] = a[rows of g] @ weights[index[g]]. weights [., N, M], a [rows, N], out [rows, M]."""
        return self.nt(a, weights.transpose(1, 2), index, group, out)

    def tn(self, a: Tensor, b: Tensor, group: Group, out: Tensor, index: list[int] | range) -> None:
        """out[index[g]] = a[rows of g]ᵀ @ b[rows of g]. Sums over tokens in float32 inside the GEMM."""
        for i, a_rows, b_rows in zip(index, a.split(group.sizes), b.split(group.sizes), strict=True):
            if out.dtype == a.dtype:
                torch.mm(a_rows.t(), b_rows, out=out.select(0, i))
            elif not thin_cpu.outer(a_rows, b_rows, out.select(0, i)):
                out.select(0, i).copy_(torch.mm(a_rows.t(), b_rows))

    def gather(self, source: Tensor, group: Group, out: Tensor) -> None:
        numba_kernels.gather(group.num_rows * source.shape[1], array(source), array(group.token), array(out))

    def scatter_add(self, rows: Tensor, group: Group, weight: Tensor, out: Tensor) -> None:
        pieces = set_threads(rows.numel())
        numba_kernels.scatter_add(rows.numel(), array(rows), array(group.token), array(weight), array(out), pieces)

    def swiglu(self, gate_up: Tensor, out: Tensor) -> None:
        numba_kernels.swiglu(gate_up.numel(), array(gate_up), array(out))

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor, group: Group, weighted: Tensor, grad_gate_up: Tensor, score: Tensor) -> None:
        arrays = (array(t) for t in (grad, gate_up, group.weight, weighted, grad_gate_up, score))
        numba_kernels.swiglu_backward(gate_up.numel(), *arrays)


def _shares(groups: list[Group], workers: int) -> list[list[Group]]:
    """Runs of consecutive groups with about the same work: rows, and 48 per expert for expanding its weights (measured, INT4)."""
    costs = np.cumsum([group.num_rows + 48 * len(group.experts) for group in groups])
    cuts = np.searchsorted(costs, costs[-1] * np.arange(1, workers) / workers).tolist()
    return [groups[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(groups)], strict=True)]
