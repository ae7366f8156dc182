"""The CUDA backend of the expert MLP: all experts at once by torch grouped GEMMs.

Offsets are on the device, without host synchronisation. Where the workspace of all experts would pass
WORKSPACE bytes they go in groups, with one wait for the offsets per call; the results have the same bits.

Runs on CPU too (bf16), which is how it is tested; speed on a GPU is not measured yet. Sorting, gathering and
SwiGLU are the ops token_permute and swiglu, by record. torch's grouped GEMM has no `out`: what stands in a
wider buffer is copied there, the rest is taken as it comes.

n = T * K rows sorted by expert, E experts, D, I, Q, P as in factors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels import int4_grouped_mm, swiglu, token_permute
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.expert_mlp import workspace
from unfreeze.kernels.expert_mlp.backend import DeviceRouting, Group
from unfreeze.kernels.expert_mlp.by_gemms import ByGemms
from unfreeze.kernels.expert_mlp.factors import Adapter, ExpertFactors, adapters
from unfreeze.quant.codec import Packed

DeviceGroup = Group[DeviceRouting]


@dataclass(frozen=True)
class Part(DeviceGroup):
    """One of several groups.

    `collected`: [n, D] rows of all groups, which the last one combines: a token's sum has one order, so no
    bit depends on the groups.
    """

    last: bool
    offsets: Tensor
    collected: dict[str, Tensor] = field(repr=False)


class Grouped(ByGemms[DeviceRouting]):
    """The backend that `fused` is given on CUDA.

    bf16; D and I multiples of 8 (16-byte strides). Ids are not checked: that would synchronise.
    """

    row_stride = 16
    keeps_workspaces = True

    def route(
        self, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, dtype: torch.dtype
    ) -> DeviceRouting:
        bucket = token_permute.bucket(ids_TK, ids_TK, weights_TK, num_experts)
        permute = choose(token_permute.OP, ids_TK.device, dtype, bucket)
        assert isinstance(permute, token_permute.TokenPermute)
        slot_n, row_of_slot, offsets_E = permute.functions.sort(ids_TK.detach(), num_experts)
        return DeviceRouting(
            num_experts,
            list(range(num_experts)),
            weight_n=weights_TK.detach().float().reshape(-1)[slot_n],
            row_of_slot=row_of_slot,
            slot_n=slot_n,
            offsets_E=offsets_E,
            per_token=ids_TK.shape[1],
            permute=permute,
        )

    def groups(self, routing: DeviceRouting, weight_bytes: int, row_bytes: int) -> Iterator[DeviceGroup]:
        """One group where the workspace holds weight_bytes of every expert.

        Else as few of equal size as there can be.
        """
        E = routing.num_experts
        fits = max(1, workspace.WORKSPACE // max(1, weight_bytes))
        if fits >= E:
            yield Group(routing, slice(0, E), slice(0, routing.num_rows))
            return
        size = -(-E // -(-E // fits))
        collected: dict[str, Tensor] = {}
        for first in range(0, E, size):
            positions = slice(first, min(E, first + size))
            begin = routing.ends[first - 1] if first else 0
            rows = slice(begin, routing.ends[positions.stop - 1])
            offsets = routing.offsets_E[positions] - begin
            yield Part(routing, positions, rows, positions.stop == E, offsets, collected)

    def decode(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor | Packed,
        down: Tensor | Packed,
        factors: ExpertFactors,
    ) -> Tensor | None:
        """Where a record says that multiplying with the codes beats expanding them."""
        if not (isinstance(gate_up, Packed) and isinstance(down, Packed)):
            return None
        rows = x_TD.new_empty((1, 1)).expand(ids_TK.numel(), 1)  # only how many they are matters
        if any(int4_grouped_mm.expands(rows, base, ids_TK) for base in (gate_up, down)):
            return None
        routing = self.route(ids_TK, weights_TK, gate_up.shape[0], x_TD.dtype)
        return self.multiply_codes(x_TD, routing, gate_up, down, factors)

    def multiply_codes(
        self,
        x_TD: Tensor,
        routing: DeviceRouting,
        gate_up: Packed,
        down: Packed,
        factors: ExpertFactors,
        impl: str = "auto",
    ) -> Tensor:
        """As expert_mlp without gradients: INT4 codes go into the GEMM's tiles.

        No expert is expanded in memory. `impl`: of int4_grouped_mm.
        """
        (group,) = self.groups(routing, 0, 0)
        x_nD = self.rows("x", group, x_TD.shape[1], x_TD.dtype)
        self.gather(x_TD, group, x_nD)

        gate_up_adapter, down_adapter = adapters(factors, None, x_TD.dtype, self.row_stride)

        # h = silu(gate) · up
        gate_up_n = _projected(x_nD, gate_up, gate_up_adapter, routing.offsets_E, impl)
        h_nI = self.rows("h", group, down.shape[2], x_TD.dtype)
        self.swiglu(gate_up_n, h_nI)

        # y[token] += w · down h
        y_nD = _projected(h_nI, down, down_adapter, routing.offsets_E, impl)
        y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        self.scatter_add(y_nD, group, group.weight, y_TD)
        return y_TD.to(x_TD.dtype)

    def workers(self, routing: DeviceRouting, weights: int) -> int:
        """One: the device shares the work out itself."""
        return 1

    def each(
        self, groups: Iterator[DeviceGroup], workers: int, work: Callable[[DeviceGroup, int], None]
    ) -> None:
        for group in groups:
            work(group, 0)

    def rows(self, name: str, group: DeviceGroup, columns: int, dtype: torch.dtype) -> Tensor:
        """The caching allocator is the scratch here."""
        return torch.empty((group.num_rows, columns), dtype=dtype, device=group.weight.device)

    def product_rows(self, name: str, group: DeviceGroup, columns: int, dtype: torch.dtype) -> Tensor | None:
        """None: at 65,536 rows of 7,168 a copy of y would move 1.9 GB.

        A part's rows of y go beside the others'.
        """
        if not isinstance(group, Part) or name != "y":
            return None
        if name not in group.collected:
            shape = (group.routing.num_rows, columns)
            group.collected[name] = torch.empty(shape, dtype=dtype, device=group.weight.device)
        return group.collected[name][group.rows]

    def nt(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: DeviceGroup, out: Tensor | None
    ) -> Tensor:
        """`index` is consecutive."""
        return self.nn(a, weights.transpose(1, 2), index, group, out)

    def nn(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: DeviceGroup, out: Tensor | None
    ) -> Tensor:
        if not len(a):  # a part that no token chose
            return a.new_empty((0, weights.shape[2])) if out is None else out
        product = F.grouped_mm(a, weights[index[0] : index[-1] + 1], offs=_offsets(group))
        return product if out is None else out.copy_(product)

    def tn(self, a: Tensor, b: Tensor, group: DeviceGroup, out: Tensor, index: Sequence[int]) -> None:
        """Zero for an expert without rows."""
        into = out[index[0] : index[-1] + 1]
        if not len(a):
            into.zero_()
            return
        into.copy_(F.grouped_mm(a.t(), b, offs=_offsets(group)))

    def gather(self, source: Tensor, group: DeviceGroup, out: Tensor) -> None:
        routing = group.routing
        routing.permute.functions.gather(source, routing.slot_n[group.rows], routing.per_token, out)

    def scatter_add(self, rows: Tensor, group: DeviceGroup, weight: Tensor, out: Tensor) -> None:
        """By gathering each token's K rows, not by atomic adds: the same bits at every run."""
        routing = group.routing
        if isinstance(group, Part):
            if not group.last:
                return
            rows = group.collected.pop("y")
            weight = routing.weight_n if weight is group.weight else torch.ones_like(routing.weight_n)
        routing.permute.functions.combine(rows, routing.row_of_slot, weight, out)

    def swiglu(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        swiglu.functions_for(gate_up).forward(gate, up, out[:, : gate.shape[1]])

    def swiglu_backward(
        self,
        grad: Tensor,
        gate_up: Tensor,
        group: DeviceGroup,
        weighted: Tensor,
        grad_gate_up: Tensor,
        score: Tensor,
    ) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        width = gate.shape[1]
        dgate, dup = grad_gate_up[:, :width], grad_gate_up[:, width : 2 * width]
        swiglu.functions_for(gate_up).backward_weighted(
            grad, gate, up, group.weight, weighted, dgate, dup, score
        )


def _offsets(group: DeviceGroup) -> Tensor:
    """Where the rows of each of the group's experts end."""
    return group.offsets if isinstance(group, Part) else group.routing.offsets_E


def _projected(x_nM: Tensor, packed: Packed, adapter: Adapter | None, offsets_E: Tensor, impl: str) -> Tensor:
    """W x + B (A x), two thin grouped GEMMs for the adapter."""
    y_nN = int4_grouped_mm.int4_grouped_mm(x_nM, packed, offsets_E, impl)
    if adapter is None:
        return y_nN
    xA_nQ = F.grouped_mm(x_nM, adapter.A.transpose(1, 2), offs=offsets_E)
    return y_nN.add_(F.grouped_mm(xA_nQ, adapter.B.transpose(1, 2), offs=offsets_E))
