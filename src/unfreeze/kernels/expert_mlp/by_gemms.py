"""A group of experts as GEMMs over expanded (or dense) matrices.

Shared by the backends for CUDA and for any CPU. This file has the order of the operations; the abstract
methods are the operations. Names and shapes as in backend.py. w is the routing weight of a row; A1, B1 adapt
gate_up, A2, B2 adapt down.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp.backend import Backend, Call, ExpertGradients, ExpertGroup, R, SavedRows
from unfreeze.kernels.expert_mlp.factors import Adapter
from unfreeze.kernels.expert_mlp.workspace import Base, Direction
from unfreeze.kernels.swiglu import reference
from unfreeze.kernels.swiglu.activation import Activation

Term = tuple[Tensor, Tensor, Sequence[int]]
"""One GEMM of a product: (rows, matrices, index of each of the group's experts among them)."""


class ByGemms(Backend[R]):
    """Forward and backward of one group, for a backend to inherit."""

    @abstractmethod
    def rows(self, name: str, group: ExpertGroup[R], columns: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [rows of the group, columns], valid until the next request with that name."""

    @abstractmethod
    def product_rows(
        self, name: str, group: ExpertGroup[R], columns: int, dtype: torch.dtype
    ) -> Tensor | None:
        """As `rows`, for a GEMM to write to; None if the backend's GEMM allocates its result itself."""

    @abstractmethod
    def nt(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: ExpertGroup[R], out: Tensor | None
    ) -> Tensor:
        """out[rows of g] = a[rows of g] @ weights[index[g]]ᵀ for each expert g of the group.

        a [rows, M], weights [., N, M], out [rows, N].
        """

    @abstractmethod
    def nn(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: ExpertGroup[R], out: Tensor | None
    ) -> Tensor:
        """out[rows of g] = a[rows of g] @ weights[index[g]].

        a [rows, N], weights [., N, M], out [rows, M].
        """

    @abstractmethod
    def tn(self, a: Tensor, b: Tensor, group: ExpertGroup[R], out: Tensor, index: Sequence[int]) -> None:
        """out[index[g]] = a[rows of g]ᵀ @ b[rows of g], summed over rows in float32."""

    @abstractmethod
    def gather(self, source: Tensor, group: ExpertGroup[R], out: Tensor) -> None:
        """out[r, :D] = source[token of r], source [T, D]; out may be wider, other columns are unchanged."""

    @abstractmethod
    def scatter_add(self, rows: Tensor, group: ExpertGroup[R], weight: Tensor | None, out: Tensor) -> None:
        """out[token of r] += weight[r] rows[r], without `weight` rows[r]. rows [., D], out [T, D] float32."""

    @abstractmethod
    def bias(self, biases: Tensor, group: ExpertGroup[R], out: Tensor) -> None:
        """out[rows of g] += biases[expert g]. biases [E, N], out [rows, N]."""

    @abstractmethod
    def sums(self, rows: Tensor, group: ExpertGroup[R], out: Tensor) -> None:
        """out[expert g] += Σ rows[rows of g]. rows [., N], out [E, N] float32."""

    def activate(self, activation: Activation, gate_up: Tensor, group: ExpertGroup[R], out: Tensor) -> None:
        """out[:, :I] = a(gate, up), gate_up [rows, 2I]; out may be wider, other columns are unchanged."""
        gate, up = activation.split(gate_up)
        reference.forward(gate, up, out[:, : gate.shape[1]], activation)

    def activate_backward(
        self,
        activation: Activation,
        grad: Tensor,
        gate_up: Tensor,
        group: ExpertGroup[R],
        weighted: Tensor,
        grad_gate_up: Tensor,
        score: Tensor,
    ) -> None:
        """The gradient of the activation from dh (`grad`, before the factor w).

        weighted = w h; grad_gate_up[:, :2I] = w times the gradient of gate_up; score = <dh, h>.
        """
        parts = activation.split(gate_up)
        into = activation.split_first(grad_gate_up, grad.shape[1])
        reference.backward_weighted(grad, *parts, group.weight, weighted, *into, score, activation)

    def add_up(
        self, gemm: Callable[..., Tensor], terms: list[Term], group: ExpertGroup[R], out: Tensor | None
    ) -> Tensor:
        """The sum of the terms' products by `gemm` (nt or nn), in `out` if that is given."""
        first, *others = terms
        result = gemm(*first, group, out)
        for term in others:
            result.add_(gemm(*term, group, None))
        return result

    def scatter_products(
        self,
        gemm: Callable[..., Tensor],
        terms: list[Term],
        group: ExpertGroup[R],
        weight: Tensor | None,
        out: Tensor,
    ) -> None:
        """`scatter_add` of the sum of the terms' products, each [., D].

        One product after the other: a sum of two would need memory for a second one of all rows, and move
        8 bytes a number where a second `scatter_add` moves 5.
        """
        for term in terms:
            rows = self.product_rows("y", group, out.shape[1], term[0].dtype)
            self.scatter_add(gemm(*term, group, rows), group, weight, out)

    def terms(
        self, base: Base, group: ExpertGroup[R], adapter: Adapter | None, direction: Direction, rows: Tensor
    ) -> list[Term]:
        """The GEMMs whose sum is the product of `rows` [x | xA] with W and its adapter.

        One with the weight itself or with the part of a workspace that this direction reads; two if a dense
        weight is multiplied in place and has an adapter: x W, and xA B (in backward dy W, and dyB A).
        """
        factor = None
        if adapter is not None:
            factor = group.experts_of(adapter.B if direction == "forward" else adapter.A)
        dense, own = base.dense(adapter), range(len(group.experts))
        if dense is None:
            workspace = base.operand(group.experts, factor, direction, group.workspace or base.name)
            return [(rows, workspace, own)]
        if factor is None or adapter is None:
            return [(rows, dense, group.experts)]
        left, right = rows.split([rows.shape[1] - adapter.width, adapter.width], dim=1)
        return [(left, dense, group.experts), (right, factor, own)]

    def factor(self, name: str, a: Tensor, b: Tensor, group: ExpertGroup[R], grads: ExpertGradients) -> None:
        """The group's share of grads.`name`, a[rows of g]ᵀ @ b[rows of g] for each expert g."""
        self.tn(a, b, group, group.experts_of(getattr(grads, name)), range(len(group.experts)))

    def instead(self, name: str, product: Tensor, group: ExpertGroup[R]) -> Tensor:
        """`rows` as wide as `product`, whose rows are read for the last time while these are written."""
        return self.rows(name, group, product.shape[1], product.dtype)

    def weighted(self, rows: Tensor, group: ExpertGroup[R]) -> Tensor:
        """w times the group's rows of a tensor of all n."""
        return (group.rows_of(rows) * group.weight[:, None]).to(rows.dtype)

    def beside(
        self, name: str, group: ExpertGroup[R], columns: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`rows` of two widths side by side: (both, left, right)."""
        both = self.rows(name, group, sum(columns), dtype)
        left, right = both.split(columns, dim=1)
        return both, left, right

    def forward_group(
        self, call: Call[R], group: ExpertGroup[R], x: Tensor, saved: SavedRows, y: Tensor
    ) -> None:
        D, I, adapters = x.shape[1], call.I, range(len(group.experts))

        # xA = x A1ᵀ beside the group's rows of x: [x | xA]
        x_rows, x_left, xA = self.beside("x", group, (D, call.Q), x.dtype)
        self.gather(x, group, x_rows)
        if call.gate_up_adapter:
            self.nt(x_left, group.experts_of(call.gate_up_adapter.A), adapters, group, xA)
            if saved.xA is not None:
                group.rows_of(saved.xA).copy_(xA)

        # gate_up = [x | xA] [W1 | B1]ᵀ = x W1ᵀ + (x A1ᵀ) B1ᵀ: in one GEMM, or two for a W1 in place
        if saved.gate_up is not None:
            gate_up = group.rows_of(saved.gate_up)
        else:
            gate_up = self.rows("gate_up", group, call.gate_up.rows, x.dtype)
        terms = self.terms(call.gate_up, group, call.gate_up_adapter, "forward", x_rows)
        self.add_up(self.nt, terms, group, gate_up)
        if call.gate_up_bias is not None:
            self.bias(call.gate_up_bias, group, gate_up)

        # h = a(gate, up), and hA = h A2ᵀ beside it: [h | hA]
        h_rows, h_left, hA = self.beside("h", group, (I, call.P), x.dtype)
        self.activate(call.activation, gate_up, group, h_rows)
        if call.down_adapter:
            self.nt(h_left, group.experts_of(call.down_adapter.A), adapters, group, hA)
            if saved.hA is not None:
                group.rows_of(saved.hA).copy_(hA)

        # y[token] += w [h | hA] [W2 | B2]ᵀ
        terms = self.terms(call.down, group, call.down_adapter, "forward", h_rows)
        self.scatter_products(self.nt, terms, group, group.weight, y)

    def backward_group(
        self,
        call: Call[R],
        group: ExpertGroup[R],
        x: Tensor,
        dy: Tensor,
        saved: SavedRows,
        score_n: Tensor,
        grads: ExpertGradients,
        dx: Tensor | None,
    ) -> None:
        assert saved.gate_up is not None
        D, I, adapters = x.shape[1], call.I, range(len(group.experts))

        # dh = dy W2 + (dy B2) A2, before the factor w: <dh, h> is the gradient of w
        dy_rows, dy_left, dyB = self.beside("dy", group, (D, call.P), x.dtype)
        self.gather(dy, group, dy_rows)
        if call.down_adapter:
            self.nt(dy_left, group.experts_of(call.down_adapter.Bt), adapters, group, dyB)
        terms = self.terms(call.down, group, call.down_adapter, "backward", dy_rows)
        dh = self.add_up(self.nn, terms, group, self.product_rows("dh", group, I, x.dtype))

        # wh = w h; dgu = w times the gradient of gate_up; score = <dh, h>
        wh = self.instead("wh", dh, group)
        dgu_rows, dgu, dguB = self.beside("dgu", group, (call.gate_up.rows, call.Q), x.dtype)
        gate_up, score = group.rows_of(saved.gate_up), group.rows_of(score_n)
        self.activate_backward(call.activation, dh, gate_up, group, wh, dgu_rows, score)
        if grads.gate_up_bias is not None:
            self.sums(dgu, group, grads.gate_up_bias)

        # dA2 = (dy B2)ᵀ (w h); dB2ᵀ = (w hA)ᵀ dy; dW2 = dyᵀ (w h)
        if saved.hA is not None:
            self.factor("down_A", dyB, wh, group, grads)
            self.factor("down_Bt", self.weighted(saved.hA, group), dy_left, group, grads)
        if grads.down is not None:
            self.tn(dy_left, wh, group, grads.down, group.experts)

        # dx[token] += dgu W1 + (dgu B1) A1; w is in dgu already
        if dx is not None or call.gate_up_adapter:
            if call.gate_up_adapter:
                self.nt(dgu, group.experts_of(call.gate_up_adapter.Bt), adapters, group, dguB)
            if dx is not None:
                terms = self.terms(call.gate_up, group, call.gate_up_adapter, "backward", dgu_rows)
                self.scatter_products(self.nn, terms, group, None, dx)

        # dA1 = (dgu B1)ᵀ x; dB1ᵀ = xAᵀ dgu; dW1 = dguᵀ x
        if call.gate_up_adapter or grads.gate_up is not None:
            x_rows = dy_left  # dy is no longer needed
            self.gather(x, group, dy_rows)
            if saved.xA is not None:
                self.factor("gate_up_A", dguB, x_rows, group, grads)
                self.factor("gate_up_Bt", group.rows_of(saved.xA), dgu, group, grads)
            if grads.gate_up is not None:
                self.tn(dgu, x_rows, group, grads.gate_up, group.experts)
