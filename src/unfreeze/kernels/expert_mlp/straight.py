"""The expert MLP with weights that hold their adapter's change, and straight-through gradients for it.

    Ŵ = Q(W + scale · B A), computed where it is used (workspace.Computed)
    y = x Ŵᵀ;  dx = dy Ŵ;  dA = (scale · dy B)ᵀ x;  dB = scale · dyᵀ (x Aᵀ), as if Q were the identity

The formulas of A and B are LoRA's; only the products with W differ: the adapter is not added to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp.backend import Backend, ExpertGroup, R
from unfreeze.kernels.expert_mlp.by_gemms import ByGemms, Term
from unfreeze.kernels.expert_mlp.factors import Adapter, ExpertFactors
from unfreeze.kernels.expert_mlp.fused import fused_expert_mlp
from unfreeze.kernels.expert_mlp.loop_cpu import LoopCpu
from unfreeze.kernels.expert_mlp.workspace import Base, Computed, Direction
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation
from unfreeze.quant.codec import Packed


class StraightThrough(ByGemms[R]):
    """Leaves the adapter out of a product with a computed weight, which holds it; its gradients stay."""

    def terms(
        self, base: Base, group: ExpertGroup[R], adapter: Adapter | None, direction: Direction, rows: Tensor
    ) -> list[Term]:
        if not isinstance(base.weight, Computed):
            return super().terms(base, group, adapter, direction, rows)
        weight = base.operand(group.experts, None, direction, group.workspace or base.name)
        own: Sequence[int] = range(len(group.experts))
        return [(rows[:, : weight.shape[2 if direction == "forward" else 1]], weight, own)]

    def decode(self, *arguments: Any) -> Tensor | None:
        """None: there are no codes to multiply with."""
        return None


class StraightCpu(StraightThrough[Any], LoopCpu):
    """On a CPU: one expert, or a group of small ones, at a time."""


def straight_expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor | Packed | Computed,
    down: Tensor | Packed | Computed,
    factors: ExpertFactors,
    reuse: Reuse | None = None,
    activation: Activation = SWIGLU,
    gate_up_bias: Tensor | None = None,
) -> Tensor:
    """As `expert_mlp`, where a computed weight holds its factors' change already."""
    backend = _backend(x_TD, down.shape[-1])
    first: Any = gate_up
    second: Any = down
    return fused_expert_mlp(
        x_TD, ids_TK, weights_TK, first, second, factors, backend, reuse, activation, gate_up_bias
    )


def _backend(x_TD: Tensor, intermediate: int) -> Backend[Any]:
    if not x_TD.is_cuda:
        return StraightCpu()
    from unfreeze.kernels.expert_mlp.grouped import Grouped
    from unfreeze.kernels.expert_mlp.loop_cuda import LoopCuda

    whole = x_TD.dtype == torch.bfloat16 and not (x_TD.shape[1] % 8 or intermediate % 8)
    on: type[Any] = Grouped if whole else LoopCuda
    return type("StraightCuda", (StraightThrough, on), {})()
