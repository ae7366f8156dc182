"""Compute a layer's experts in groups of neighbours, one group at a time, for layers larger than a buffer.

sort the T K rows by expert             as parallel/placement/dispatch.py does, on one process
forward  for each group                 load it, expert_mlp of its rows, K = 1
         sum each token's K rows in float32
backward for each group, last first     load it, expert_mlp of its rows again, and its backward

So a group is loaded once in forward and once in backward. With recompute "layers", the second visit of a
layer computes nothing here, because backward works group by group. "selective" and "elementwise" save for
each group what the op saves.
In float32, results and gradients are bit-identical to those of all experts at once, for the same rows in the
same order; biases of down are added to the sums, as there. In bf16 a row is rounded once more before it is
summed, as in parallel/placement/dispatch.py.

T tokens, K experts per token, E experts, n = T K rows, D width.
"""

# torch's Function.backward is untyped
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
FEW = 8  # up to this many rows are multiplied with the codes directly, however few experts they use
FACTORS = ("gate_up_A", "gate_up_B", "down_A", "down_B")


@dataclass
class _Slice:
    """The adapter factors of a group's experts, as that group's adapter."""

    group_factors: ExpertFactors

    def factors(self) -> ExpertFactors:
        return self.group_factors


def part_of(experts: Experts, rows: Rows, tensors: dict[str, Tensor]) -> Experts:
    """Return those experts as a module of their own.

    tensors: name within `experts` -> the group's streamed weights. Everything else, such as biases, is a view
    of the layer's.
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
    """An `Experts.dispatch` for one process: rows go through the experts group by group.

    parts  returns the groups' rows and modules (`part_of`) in order, once the layer has memory
    visit  visit(g) returns when group g's weights are loaded
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
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Like Experts.forward."""
        first: list[bool] = []

        def noted(compute: Callable[[], T]) -> T:
            def found() -> T:
                first.append(True)
                return compute()

            return found() if once is None else once(found)

        # on the second visit with gradients the results are not read: backward computes what it needs
        call: Any = _Call(self, experts, lambda: bool(first) or not torch.is_grad_enabled())
        y_TD = self._sorted(call, x_TD, ids_TK, weights_TK, reuse, noted)
        y_TD = experts.biased(y_TD, ids_TK, weights_TK)
        return y_TD if beside is None else y_TD + beside()

    def visit(self, group: int) -> Experts:
        self._visit(group)
        return self.parts[group][1]


@dataclass
class _Call:
    """Takes the place of the experts in RowsDispatch during one call."""

    groups: InGroups
    experts: Experts
    read: Callable[[], bool]

    def here(self, x_nD: Tensor, ids_n1: Tensor, weights_n1: Tensor, reuse: Reuse | None = None) -> Tensor:
        """Return results [n, D] of rows sorted by expert; zeros if they are not read."""
        adapter = self.experts.adapter
        adapter_factors = ExpertFactors() if adapter is None else adapter.factors()
        cuts = torch.tensor([rows.first for rows, _ in self.groups.parts], device=ids_n1.device)
        ends = [*ints(torch.searchsorted(ids_n1[:, 0], cuts)), len(ids_n1)]
        spans = [slice(a, b) for a, b in pairwise(ends)]
        # what each group's op saves for backward; with `reuse`, the layer's second visit finds it again
        saved_by_group: list[Saved] = []

        if reuse is not None:
            saved_by_group = reuse(lambda: [Saved() for _ in spans])
        codes = not torch.is_grad_enabled() and _multiplies_codes(self.groups.parts[0][1], ids_n1)
        run = _Run(self.groups, spans, ids_n1, adapter_factors, saved_by_group, self.read(), codes)
        return _InGroups.apply(x_nD, weights_n1, run, *(getattr(adapter_factors, name) for name in FACTORS))


@dataclass
class _Run:
    groups: InGroups
    spans: list[slice]
    ids_n1: Tensor
    all_factors: ExpertFactors
    saved: list[Saved]
    read: bool
    codes: bool

    def of(self, group: int, x_nD: Tensor, weights_n1: Tensor, factors: Sequence[Tensor | None]) -> Tensor:
        """Return the results of a group's rows; its weights must be loaded."""
        rows, part = self.groups.parts[group]
        part.adapter = None
        if any(factor is not None for factor in factors):
            part.adapter = _Slice(replace(self.all_factors, **dict(zip(FACTORS, factors, strict=True))))
        ids_n1 = self.ids_n1[self.spans[group]] - rows.first
        if self.saved:
            return part.product(x_nD, ids_n1, weights_n1, self.saved[group].reuse)
        # Without gradients and `reuse` the op multiplies few rows with the codes directly. All rows together
        # decide if a group does so, so that the bits equal those of all experts at once.
        if not self.codes:
            return part.product(x_nD, ids_n1, weights_n1, _computed)
        few = (split(each, FEW) for each in (x_nD, ids_n1, weights_n1))
        return torch.cat([part.product(*piece) for piece in zip(*few, strict=True)])


def _computed(compute: Callable[[], T]) -> T:
    return compute()


def _multiplies_codes(part: Experts, ids_n1: Tensor) -> bool:
    """Return True if the op would expand no expert for these rows (kernels/expert_mlp/decode_cpu.py)."""
    gate_up, down = part.gate_up_proj.value(), part.down_proj.value()
    if not (isinstance(gate_up, Packed) and isinstance(down, Packed)):
        return False
    if ids_n1.is_cuda or part.activation != SWIGLU or part.impl not in ("auto", "fused"):
        return False
    from unfreeze.kernels.expert_mlp.decode_cpu import reads

    return reads(len(ids_n1), len(cast("Tensor", ids_n1.unique())), gate_up, down)


class _InGroups(torch.autograd.Function):
    """(x [n, D], weights [n, 1], factors) -> results [n, D].

    Backward computes the results again, group by group.
    """

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
            if run.saved:
                run.saved[group].second = True
            with torch.enable_grad():
                y = run.of(group, x, weights, own)
            inputs = [x, weights, *own]
            wanted = [i for i in inputs if i is not None and i.requires_grad]
            came = iter(torch.autograd.grad(y, wanted, dy_nD[span]))
            into = [dx_nD[span], dweights_n1[span], *(None if g is None else g[rows] for g in gradients)]
            for each, place in zip(inputs, into, strict=True):
                if each is not None and each.requires_grad:
                    assert place is not None
                    place.copy_(next(came))
        return dx_nD if need_x else None, dweights_n1 if need_weights else None, None, *gradients
