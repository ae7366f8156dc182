"""The expert MLP on CUDA in plain torch: `Grouped` with a torch.mm per expert.

It runs where grouped GEMMs cannot: in float32, for widths that are not multiples of 8, and on a GPU where
they fail their check. No grouped GEMM and no Triton kernel. Groups of experts, workspace and saved rows are
those of `Grouped`, so it needs the bytes that the plan counts; the reference would keep every expanded expert
until backward. The host waits once per layer and visit, for the number of rows of each expert.

n rows sorted by expert, E experts, D, I, Q, P as in factors.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp.backend import DeviceRouting
from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.expert_mlp.grouped import DeviceGroup, Grouped
from unfreeze.kernels.loops.rows import slabs
from unfreeze.kernels.swiglu import reference
from unfreeze.kernels.swiglu.activation import Activation
from unfreeze.kernels.token_permute import TokenPermute
from unfreeze.kernels.token_permute import reference as permute
from unfreeze.quant.codec import Packed

SLAB_BYTES = 1 << 24  # of a float32 tensor of an activation's formula, which makes up to ten of them


class LoopCuda(Grouped):
    """The backend of `loop`, on CUDA. bf16 or float32, any widths; it runs on a CPU too, for tests."""

    expand = "reference"

    def permute(
        self, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, dtype: torch.dtype
    ) -> TokenPermute:
        return TokenPermute(permute)

    def decode(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor | Packed,
        down: Tensor | Packed,
        factors: ExpertFactors,
    ) -> Tensor | None:
        return None

    def nn(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: DeviceGroup, out: Tensor | None
    ) -> Tensor:
        result = a.new_empty((len(a), weights.shape[2])) if out is None else out
        sizes = _sizes(group)
        for i, a_rows, rows in zip(index, a.split(sizes), result.split(sizes), strict=True):
            if len(rows):
                torch.mm(a_rows, weights[i], out=rows)
        return result

    def tn(self, a: Tensor, b: Tensor, group: DeviceGroup, out: Tensor, index: Sequence[int]) -> None:
        sizes = _sizes(group)
        for i, a_rows, b_rows in zip(index, a.split(sizes), b.split(sizes), strict=True):
            if len(a_rows):
                torch.mm(a_rows.t(), b_rows, out=out[i])
            else:
                out[i].zero_()

    def outer(self, a: Tensor, b: Tensor, group: DeviceGroup) -> Tensor:
        products = a.new_empty((len(group.experts), a.shape[1], b.shape[1]))
        self.tn(a, b, group, products, range(len(products)))
        return products

    def activate(self, activation: Activation, gate_up: Tensor, group: DeviceGroup, out: Tensor) -> None:
        gate, up = activation.split(gate_up)
        for rows in slabs(len(gate), 4 * gate.shape[1], SLAB_BYTES):
            reference.forward(gate[rows], up[rows], out[rows, : gate.shape[1]], activation)

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
        gate, up = activation.split(gate_up)
        dgate, dup = activation.split_first(grad_gate_up, grad.shape[1])
        for some in slabs(len(grad), 4 * grad.shape[1], SLAB_BYTES):
            into = weighted[some], dgate[some], dup[some], score[some]
            reference.backward_weighted(
                grad[some], gate[some], up[some], group.weight[some], *into, activation
            )


def _sizes(group: DeviceGroup) -> list[int]:
    """The rows of each of the group's experts. The first call for a routing waits for the device."""
    routing: DeviceRouting = group.routing
    edges = [0, *routing.ends][group.positions.start : group.positions.stop + 1]
    return [end - begin for begin, end in pairwise(edges)]
