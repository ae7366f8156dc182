"""The CUDA backend of the expert MLP: all experts at once by grouped GEMMs.

Offsets are on the device, without host synchronisation. If the workspace of all experts would exceed
WORKSPACE bytes they go in groups, with one wait for the offsets per call; the results are bit-identical.
Dense weights need no workspace: base and adapter are two grouped GEMMs. Runs on CPU too (bf16), where it is
tested; speed on a GPU is not measured yet. Sorting, gathering and the activation are the ops token_permute
and swiglu, chosen by record; the grouped GEMM is the op grouped_mm.

n = T * K rows sorted by expert, E experts, D, I, Q, P as in factors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from unfreeze.kernels import int4_grouped_mm, swiglu, token_permute
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.expert_mlp import workspace
from unfreeze.kernels.expert_mlp.backend import DeviceRouting, ExpertGradients, ExpertGroup
from unfreeze.kernels.expert_mlp.by_gemms import ByGemms, Term
from unfreeze.kernels.expert_mlp.factors import Adapter, ExpertFactors, adapters
from unfreeze.kernels.grouped_mm import grouped_mm
from unfreeze.kernels.loops.rows import slabs
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation
from unfreeze.quant.codec import Packed

DeviceGroup = ExpertGroup[DeviceRouting]
Made = TypeVar("Made")
SLAB_BYTES = 1 << 28  # of rows in float32 at once, where their sum is taken


class Cuts:
    """A call's tensors, split for its parts.

    One torch operation splits or transposes a tensor for all parts: for small groups the host's time goes
    into the number of operations.

    rows, experts  the number of each per part
    collected      [n, D], rows of all parts. The last part combines them: the order of a token's sum is then
                   always the same, so no bit of it depends on the groups
    products       gradients of adapters, a tensor per part, which the last part concatenates
    """

    def __init__(self, rows: list[int], experts: list[int]):
        self.rows, self.experts = rows, experts
        self.collected: dict[str, Tensor] = {}
        self.products: dict[str, list[Tensor]] = {}
        self._made: dict[tuple[str, int], tuple[Tensor, Any]] = {}
        self._place: dict[int, tuple[Tensor, int]] = {}  # id of a piece -> (its whole tensor, its index)

    def once(self, name: str, source: Tensor, make: Callable[[Tensor], Made]) -> Made:
        """make(source), computed once and kept under `name`."""
        if (name, id(source)) not in self._made:
            self._made[name, id(source)] = (
                source,
                make(source),
            )  # also keeps the source, so that its id is not reused
        return self._made[name, id(source)][1]

    def of(self, whole: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        """`whole` split along its first dimension."""

        def cut(whole: Tensor) -> Sequence[Tensor]:
            pieces = whole.split(sizes)
            self._place |= {id(piece): (whole, number) for number, piece in enumerate(pieces)}
            return pieces

        return self.once("pieces", whole, cut)

    def gate_and_up(self, piece: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
        """gate and up [., I] of a piece [., 2I] in the activation's layout."""
        whole, number = self._place[id(piece)]
        first, second = self.once("gate and up", whole, activation.split)
        return self.of(first, self.rows)[number], self.of(second, self.rows)[number]

    def turned(self, tensor: Tensor) -> Tensor:
        """`tensor` with its last two dimensions transposed; a piece is split from its transposed whole."""
        if id(tensor) not in self._place:
            return tensor.transpose(-2, -1)  # not cached: it would hold a part's buffers until the last part
        whole, number = self._place[id(tensor)]
        sizes = [len(piece) for piece in self.of(whole, [])]
        dim = 1 if whole.dim() == 2 else 0
        return self.once("turned pieces", whole, lambda w: w.transpose(-2, -1).split(sizes, dim))[number]


@dataclass(frozen=True)
class Part(DeviceGroup):
    """Group `number` of several. One workspace holds the gate_up of a part, then its down."""

    number: int
    offsets: Tensor
    cuts: Cuts = field(repr=False)
    workspace: ClassVar[str] = "base"

    @property
    def last(self) -> bool:
        return self.number == len(self.cuts.rows) - 1

    def rows_of(self, whole: Tensor) -> Tensor:
        return self.cuts.of(whole, self.cuts.rows)[self.number]

    def experts_of(self, whole: Tensor) -> Tensor:
        return self.cuts.of(whole, self.cuts.experts)[self.number]


class Grouped(ByGemms[DeviceRouting]):
    """The backend of `fused` on CUDA.

    bf16; D and I multiples of 8 (16-byte strides). Expert ids are not checked: that would synchronise.
    """

    row_stride = 16
    factor_buffers = False
    dense_in_place = True

    def route(
        self, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, dtype: torch.dtype
    ) -> DeviceRouting:
        permute = self.permute(ids_TK, weights_TK, num_experts, dtype)
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

    def permute(
        self, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, dtype: torch.dtype
    ) -> token_permute.TokenPermute:
        """The implementation that sorts, gathers and combines."""
        bucket = token_permute.bucket(ids_TK, ids_TK, weights_TK, num_experts)
        chosen = choose(token_permute.OP, ids_TK.device, dtype, bucket)
        assert isinstance(chosen, token_permute.TokenPermute)
        return chosen

    def groups(
        self, routing: DeviceRouting, weight_bytes: tuple[int, int], row_bytes: int, *, both: bool
    ) -> Iterator[DeviceGroup]:
        """One group if the workspace holds gate_up and down of every expert, whatever `both` is.

        Forward's workspace can then be reused in backward. Dense weights need none. Otherwise as few groups
        of equal size as fit, with either gate_up or down in the workspace.
        """
        E = routing.num_experts
        if sum(weight_bytes) * E <= workspace.WORKSPACE:
            yield ExpertGroup(routing, slice(0, E), slice(0, routing.num_rows))
            return
        fits = max(1, workspace.WORKSPACE // max(1, *weight_bytes))
        size = -(-E // -(-E // fits))
        begins = range(0, E, size)
        ends = [min(E, first + size) for first in begins]
        edges = [0, *(routing.ends[end - 1] for end in ends)]
        cuts = Cuts([b - a for a, b in pairwise(edges)], [b - a for a, b in pairwise([0, *ends])])
        # the offsets of each part, counted from its own first row
        offsets: Sequence[Tensor] = torch._foreach_sub(  # pyright: ignore[reportPrivateImportUsage]
            routing.offsets_E.split(cuts.experts), edges[:-1]
        )
        for number, first in enumerate(begins):
            positions, rows = slice(first, ends[number]), slice(edges[number], edges[number + 1])
            yield Part(routing, positions, rows, number, offsets[number], cuts)

    def decode(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor | Packed,
        down: Tensor | Packed,
        factors: ExpertFactors,
    ) -> Tensor | None:
        """The result, if a record says that multiplying with the codes beats expanding them; else None."""
        if not (isinstance(gate_up, Packed) and isinstance(down, Packed)):
            return None
        rows = x_TD.new_empty((1, 1)).expand(ids_TK.numel(), 1)  # only the number of rows matters
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
        (group,) = self.groups(routing, (0, 0), 0, both=False)
        x_nD = self.rows("x", group, x_TD.shape[1], x_TD.dtype)
        self.gather(x_TD, group, x_nD)

        gate_up_adapter, down_adapter = adapters(factors, None, x_TD.dtype, self.row_stride)

        # h = silu(gate) · up
        gate_up_n = _projected(x_nD, gate_up, gate_up_adapter, routing.offsets_E, impl)
        h_nI = self.rows("h", group, down.shape[2], x_TD.dtype)
        self.activate(SWIGLU, gate_up_n, group, h_nI)

        # y[token] += w · down h
        y_nD = _projected(h_nI, down, down_adapter, routing.offsets_E, impl)
        y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        self.scatter_add(y_nD, group, group.weight, y_TD)
        return y_TD.to(x_TD.dtype)

    def workers(self, routing: DeviceRouting, weights: int) -> int:
        """One: the device distributes the work itself."""
        return 1

    def each(
        self, groups: Iterator[DeviceGroup], workers: int, work: Callable[[DeviceGroup, int], None]
    ) -> None:
        for group in groups:
            work(group, 0)

    def rows(self, name: str, group: DeviceGroup, columns: int, dtype: torch.dtype) -> Tensor:
        """New memory: torch's caching allocator already reuses it, as scratch does on a CPU."""
        return torch.empty((group.num_rows, columns), dtype=dtype, device=group.weight.device)

    def product_rows(self, name: str, group: DeviceGroup, columns: int, dtype: torch.dtype) -> Tensor | None:
        """None, so that a GEMM's result is used without a copy: 1.9 GB for y at 65,536 rows of 7,168.

        Only with several parts, the rows of y are collected in one tensor.
        """
        if not isinstance(group, Part) or name != "y":
            return None
        collected = group.cuts.collected
        if name not in collected:
            shape = (group.routing.num_rows, columns)
            collected[name] = torch.empty(shape, dtype=dtype, device=group.weight.device)
        return group.rows_of(collected[name])

    def nt(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: DeviceGroup, out: Tensor | None
    ) -> Tensor:
        """`index` is consecutive."""
        return self.nn(a, _turned(weights, group), index, group, out)

    def nn(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: DeviceGroup, out: Tensor | None
    ) -> Tensor:
        if not len(a):  # a part without tokens
            return a.new_empty((0, weights.shape[2])) if out is None else out
        return grouped_mm(a, _of(weights, index), _offsets(group), out)

    def tn(self, a: Tensor, b: Tensor, group: DeviceGroup, out: Tensor, index: Sequence[int]) -> None:
        _of(out, index).copy_(self.outer(a, b, group))

    def outer(self, a: Tensor, b: Tensor, group: DeviceGroup) -> Tensor:
        """a[rows of g]ᵀ @ b[rows of g] for each expert g; zero for one without rows."""
        if not len(a):
            return a.new_zeros((len(group.experts), a.shape[1], b.shape[1]))
        return grouped_mm(_turned(a, group), b, _offsets(group))

    def factor(self, name: str, a: Tensor, b: Tensor, group: DeviceGroup, grads: ExpertGradients) -> None:
        """The product itself is the gradient; with several parts the last one joins them."""
        product = self.outer(a, b, group)
        if isinstance(group, Part):
            products = group.cuts.products.setdefault(name, [])
            products.append(product)
            if not group.last:
                return
            product = torch.cat(group.cuts.products.pop(name))
        setattr(grads, name, product)

    def gather(self, source: Tensor, group: DeviceGroup, out: Tensor) -> None:
        routing = group.routing
        routing.permute.functions.gather(source, group.rows_of(routing.slot_n), routing.per_token, out)

    def weighted(self, rows: Tensor, group: DeviceGroup) -> Tensor:
        if not isinstance(group, Part):
            return super().weighted(rows, group)
        weight_n = group.routing.weight_n
        return group.rows_of(
            group.cuts.once("weighted", rows, lambda whole: (whole * weight_n[:, None]).to(whole.dtype))
        )

    def instead(self, name: str, product: Tensor, group: DeviceGroup) -> Tensor:
        """In place: swiglu's kernels read a number before they write to it."""
        return product

    def scatter_add(self, rows: Tensor, group: DeviceGroup, weight: Tensor | None, out: Tensor) -> None:
        """By gathering each token's K rows, not by atomic adds: bit-identical at every run."""
        routing = group.routing
        if isinstance(group, Part):
            if not group.last:
                return
            rows = group.cuts.collected.pop("y")
            weight = None if weight is None else routing.weight_n
        routing.permute.functions.combine(rows, routing.row_of_slot, weight, out)

    def scatter_products(
        self,
        gemm: Callable[..., Tensor],
        terms: list[Term],
        group: DeviceGroup,
        weight: Tensor | None,
        out: Tensor,
    ) -> None:
        """With several parts the terms are summed first: the rows of all parts are collected once."""
        if not isinstance(group, Part):
            super().scatter_products(gemm, terms, group, weight, out)
            return
        rows = self.product_rows("y", group, out.shape[1], terms[0][0].dtype)
        self.scatter_add(self.add_up(gemm, terms, group, rows), group, weight, out)

    def bias(self, biases: Tensor, group: DeviceGroup, out: Tensor) -> None:
        out += biases[_experts(group)].to(out.dtype)

    def sums(self, rows: Tensor, group: DeviceGroup, out: Tensor) -> None:
        experts = _experts(group)
        for some in slabs(len(rows), 4 * rows.shape[1], SLAB_BYTES):
            out.index_add_(0, experts[some], rows[some].float())

    def activate(self, activation: Activation, gate_up: Tensor, group: DeviceGroup, out: Tensor) -> None:
        gate, up = activation.split(gate_up)
        functions = swiglu.functions_for(gate_up, activation=activation)
        functions.forward(gate, up, out[:, : gate.shape[1]], activation)

    def activate_backward(
        self,
        activation: Activation,
        grad: Tensor,
        gate_up: Tensor,
        group: DeviceGroup,
        weighted: Tensor,
        grad_gate_up: Tensor,
        score: Tensor,
    ) -> None:
        parts = (
            group.cuts.gate_and_up(gate_up, activation)
            if isinstance(group, Part)
            else activation.split(gate_up)
        )
        into = activation.split_first(grad_gate_up, grad.shape[1])
        swiglu.functions_for(gate_up, activation=activation).backward_weighted(
            grad, *parts, group.weight, weighted, *into, score, activation
        )


def _turned(tensor: Tensor, group: DeviceGroup) -> Tensor:
    """`tensor` with its last two dimensions transposed."""
    return group.cuts.turned(tensor) if isinstance(group, Part) else tensor.transpose(-2, -1)


def _of(stack: Tensor, index: Sequence[int]) -> Tensor:
    """The matrices `index` of a stack, which are consecutive."""
    return stack if len(index) == len(stack) else stack[index[0] : index[-1] + 1]


def _experts(group: DeviceGroup) -> Tensor:
    """The expert of each of the group's rows, int64, without a wait for the device."""
    rows = torch.arange(group.num_rows, device=group.weight.device, dtype=torch.int32)
    return torch.searchsorted(_offsets(group), rows, right=True) + group.experts[0]


def _offsets(group: DeviceGroup) -> Tensor:
    """The end of the rows of each of the group's experts."""
    return group.offsets if isinstance(group, Part) else group.routing.offsets_E


def _projected(x_nM: Tensor, packed: Packed, adapter: Adapter | None, offsets_E: Tensor, impl: str) -> Tensor:
    """W x + B (A x), two thin grouped GEMMs for the adapter."""
    y_nN = int4_grouped_mm.int4_grouped_mm(x_nM, packed, offsets_E, impl)
    if adapter is None:
        return y_nN
    xA_nQ = grouped_mm(x_nM, adapter.A.transpose(1, 2), offsets_E)
    return y_nN.add_(grouped_mm(xA_nQ, adapter.B.transpose(1, 2), offsets_E))
