"""A layer's experts in groups of neighbours, one group after the other: for a layer that no buffer holds.

    sort the T K rows by expert             as parallel/placement/dispatch.py does, of one process
    forward  for each group                 visit it, expert_mlp of its rows, K = 1
    sum each token's K rows in float32
    backward for each group, last first     visit it, expert_mlp of its rows again, and its backward

So a group comes once in forward and once in backward. With recompute "layers" the second visit of a layer
computes nothing here: backward does it group by group. "selective" and "elementwise" keep for each group what
the op keeps.
In float32 results and gradients equal those of all experts at once to the bit, for the same rows in the same
order; biases of down are added to the sums, as there. In bf16 a row is rounded once more before it is summed,
as in parallel/placement/dispatch.py.

T tokens, K experts per token, E experts, n = T K rows, D width.
"""

# torch leaves backward of a Function without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from unfreeze.core.rows import Rows
from unfreeze.core.torch_types import buffers_of, ints, named_modules, parameters_of, split
from unfreeze.kernels.expert_mlp import SWIGLU, ExpertFactors
from unfreeze.kernels.recompute import Reuse
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.saved import Saved
from unfreeze.parallel.placement.dispatch import RowsDispatch
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.quant.codec import Packed

T = TypeVar("T")
FEW = 8  # rows that are multiplied with the codes, however few experts they are at
FACTORS = ("gate_up_A", "gate_up_B", "down_A", "down_B")


@dataclass
class _Slice:
    """The factors of a group's experts, as the adapter of that group."""

    given: ExpertFactors

    def factors(self) -> ExpertFactors:
        return self.given


def part_of(experts: Experts, rows: Rows, tensors: dict[str, Tensor]) -> Experts:
    """Those experts as a module of their own.

    tensors: name within `experts` -> the group's weights, which stream. What else it has, as biases, is a
    view of the layer's.
    """
    part = type(experts)(
        len(rows),
        experts.hidden_size,
        experts.intermediate_size,
        codec=experts.down_proj.codec,
        dtype=torch.float32,
        device="meta",
        activation=experts.activation,
    )
    for name, module in named_modules(part):
        theirs = experts.get_submodule(name)
        parameters, buffers = parameters_of(module), buffers_of(module)
        for leaf in [*parameters, *buffers]:
            full = f"{name}.{leaf}" if name else leaf
            held = tensors[full] if full in tensors else getattr(theirs, leaf).detach()[rows.slice]
            if leaf in parameters:
                parameters[leaf] = nn.Parameter(held, requires_grad=False)
            else:
                buffers[leaf] = held
    part.impl = experts.impl
    return part


class InGroups:
    """The joint of `Experts.dispatch` in one process: rows go through the experts group by group.

    parts  makes the groups' rows and modules (`part_of`), in order, once the layer has its memory
    visit  visit(g) returns when group g's weights are here
    """

    def __init__(
        self,
        parts: Callable[[], Sequence[tuple[Rows, Experts]]],
        num_experts: int,
        visit: Callable[[int], None],
    ):
        self.rows = Rows(0, num_experts, num_experts)
        self._make, self._visit = parts, visit
        self._sorted = RowsDispatch(ALONE, [self.rows])
        self._parts: Sequence[tuple[Rows, Experts]] | None = None

    @property
    def parts(self) -> Sequence[tuple[Rows, Experts]]:
        if self._parts is None:
            self._parts = self._make()
        return self._parts

    def __call__(
        self,
        experts: Experts,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        reuse: Reuse | None,
        once: Reuse | None,
    ) -> Tensor:
        """As Experts.forward."""
        first: list[bool] = []

        def noted(compute: Callable[[], T]) -> T:
            def found() -> T:
                first.append(True)
                return compute()

            return found() if once is None else once(found)

        # on the second visit with gradients nobody reads the results: backward makes what it needs itself
        call: Any = _Call(self, experts, lambda: bool(first) or not torch.is_grad_enabled())
        y_TD = self._sorted(call, x_TD, ids_TK, weights_TK, reuse, noted)
        return experts.biased(y_TD, ids_TK, weights_TK)

    def visit(self, group: int) -> Experts:
        self._visit(group)
        return self.parts[group][1]


@dataclass
class _Call:
    """What RowsDispatch takes for the experts, during one call."""

    groups: InGroups
    experts: Experts
    read: Callable[[], bool]

    def here(self, x_nD: Tensor, ids_n1: Tensor, weights_n1: Tensor, reuse: Reuse | None = None) -> Tensor:
        """x and weights of rows sorted by expert -> their results [n, D]; zeros where nobody reads them."""
        adapter = self.experts.adapter
        given = ExpertFactors() if adapter is None else adapter.factors()
        cuts = torch.tensor([rows.first for rows, _ in self.groups.parts], device=ids_n1.device)
        ends = [*ints(torch.searchsorted(ids_n1[:, 0], cuts)), len(ids_n1)]
        spans = [slice(a, b) for a, b in pairwise(ends)]
        # of each group, what its op keeps for backward; with `reuse` the layer's second visit finds it again
        kept: list[Saved] = []

        if reuse is not None:
            kept = reuse(lambda: [Saved() for _ in spans])
        codes = not torch.is_grad_enabled() and _multiplies_codes(self.groups.parts[0][1], ids_n1)
        run = _Run(self.groups, spans, ids_n1, given, kept, self.read(), codes)
        return _InGroups.apply(x_nD, weights_n1, run, *(getattr(given, name) for name in FACTORS))


@dataclass
class _Run:
    groups: InGroups
    spans: list[slice]
    ids_n1: Tensor
    given: ExpertFactors
    kept: list[Saved]
    read: bool
    codes: bool

    def of(self, group: int, x_nD: Tensor, weights_n1: Tensor, factors: Sequence[Tensor | None]) -> Tensor:
        """The results of a group's rows; its weights are here."""
        rows, part = self.groups.parts[group]
        part.adapter = None
        if any(factor is not None for factor in factors):
            part.adapter = _Slice(replace(self.given, **dict(zip(FACTORS, factors, strict=True))))
        ids_n1 = self.ids_n1[self.spans[group]] - rows.first
        if self.kept:
            return part.product(x_nD, ids_n1, weights_n1, self.kept[group].reuse)
        # Without gradients and `reuse` the op multiplies few rows with the codes themselves. Whether a group
        # does follows from all rows, so that the bits are those of all experts at once.
        if not self.codes:
            return part.product(x_nD, ids_n1, weights_n1, _computed)
        few = (split(each, FEW) for each in (x_nD, ids_n1, weights_n1))
        return torch.cat([part.product(*given) for given in zip(*few, strict=True)])


def _computed(compute: Callable[[], T]) -> T:
    return compute()


def _multiplies_codes(part: Experts, ids_n1: Tensor) -> bool:
    """Whether the op, given all these rows, would expand no expert (kernels/expert_mlp/decode_cpu.py)."""
    gate_up, down = part.gate_up_proj.value(), part.down_proj.value()
    if not (isinstance(gate_up, Packed) and isinstance(down, Packed)):
        return False
    if ids_n1.is_cuda or part.activation != SWIGLU or part.impl not in ("auto", "fused"):
        return False
    from unfreeze.kernels.expert_mlp.decode_cpu import reads

    return reads(len(ids_n1), len(cast("Tensor", ids_n1.unique())), gate_up, down)


class _InGroups(torch.autograd.Function):
    """(x [n, D], weights [n, 1], factors) -> results [n, D]; backward computes them again, group by group."""

    @staticmethod
    def forward(ctx: Any, x_nD: Tensor, weights_n1: Tensor, run: _Run, *factors: Tensor | None) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x_nD, weights_n1, *factors)
        if not run.read:
            return torch.zeros_like(x_nD)
        y_nD = torch.empty_like(x_nD)
        for group, span in enumerate(run.spans):
            run.groups.visit(group)
            if span.start < span.stop:
                own = [None if f is None else f[run.groups.parts[group][0].slice] for f in factors]
                y_nD[span] = run.of(group, x_nD[span], weights_n1[span], own)
        return y_nD

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        (dy_nD,) = dy
        x_nD, weights_n1, *factors = ctx.saved_tensors
        need_x, need_weights, _, *need = ctx.needs_input_grad
        dx_nD, dweights_n1 = torch.empty_like(x_nD), torch.empty_like(weights_n1)
        gradients = [torch.zeros_like(f) if n else None for f, n in zip(factors, need, strict=True)]
        for group, span in reversed(list(enumerate(run.spans))):
            run.groups.visit(group)
            if span.start == span.stop:
                continue
            rows = run.groups.parts[group][0].slice
            x, weights = x_nD[span].requires_grad_(need_x), weights_n1[span].requires_grad_(need_weights)
            own = [
                None if f is None else f[rows].detach().requires_grad_(n)
                for f, n in zip(factors, need, strict=True)
            ]
            if run.kept:
                run.kept[group].second = True
            with torch.enable_grad():
                y = run.of(group, x, weights, own)
            inputs = [x, weights, *own]
            asked = [i for i in inputs if i is not None and i.requires_grad]
            came = iter(torch.autograd.grad(y, asked, dy_nD[span]))
            into = [dx_nD[span], dweights_n1[span], *(None if g is None else g[rows] for g in gradients)]
            for given, place in zip(inputs, into, strict=True):
                if given is not None and given.requires_grad:
                    assert place is not None
                    place.copy_(next(came))
        return dx_nD if need_x else None, dweights_n1 if need_weights else None, None, *gradients
