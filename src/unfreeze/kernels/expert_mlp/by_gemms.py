"""A group of experts as GEMMs over expanded (or dense) matrices.

What the backends for CUDA and for any CPU share. This file has the order of the operations; the abstract
methods are the operations themselves. Names and shapes as in backend.py. w is the routing weight of a row;
A1, B1 adapt gate_up, A2, B2 adapt down.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp.backend import Backend, Call, Gradients, Group, R, Saved
from unfreeze.kernels.expert_mlp.factors import Adapter
from unfreeze.kernels.expert_mlp.workspace import Base, Direction


class ByGemms(Backend[R]):
    """Forward and backward of one group, for a backend to inherit."""

    @abstractmethod
    def rows(self, name: str, group: Group[R], columns: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [rows of the group, columns], valid until asked for by that name again."""

    @abstractmethod
    def product_rows(self, name: str, group: Group[R], columns: int, dtype: torch.dtype) -> Tensor | None:
        """As `rows`, for a GEMM to write to; None where the backend's GEMM allocates its result itself."""

    @abstractmethod
    def nt(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: Group[R], out: Tensor | None
    ) -> Tensor:
        """out[rows of g] = a[rows of g] @ weights[index[g]]ᵀ for each expert g of the group.

        a [rows, M], weights [., N, M], out [rows, N].
        """

    @abstractmethod
    def nn(
        self, a: Tensor, weights: Tensor, index: Sequence[int], group: Group[R], out: Tensor | None
    ) -> Tensor:
        """out[rows of g] = a[rows of g] @ weights[index[g]].

        a [rows, N], weights [., N, M], out [rows, M].
        """

    @abstractmethod
    def tn(self, a: Tensor, b: Tensor, group: Group[R], out: Tensor, index: Sequence[int]) -> None:
        """out[index[g]] = a[rows of g]ᵀ @ b[rows of g], summed over rows in float32."""

    @abstractmethod
    def gather(self, source: Tensor, group: Group[R], out: Tensor) -> None:
        """out[r, :D] = source[token of r]. source [T, D]; out may be wider, the rest is left alone."""

    @abstractmethod
    def scatter_add(self, rows: Tensor, group: Group[R], weight: Tensor, out: Tensor) -> None:
        """out[token of r] += weight[r] rows[r]. rows [., D], out [T, D] float32."""

    @abstractmethod
    def swiglu(self, gate_up: Tensor, out: Tensor) -> None:
        """out[:, :I] = silu(gate) · up. gate_up [rows, 2I]; out may be wider, the rest is left alone."""

    @abstractmethod
    def swiglu_backward(
        self,
        grad: Tensor,
        gate_up: Tensor,
        group: Group[R],
        weighted: Tensor,
        grad_gate_up: Tensor,
        score: Tensor,
    ) -> None:
        """The gradient of SwiGLU from dh (`grad`, not yet times w).

        weighted = w h; grad_gate_up[:, :2I] = w times the gradient of gate_up; score = <dh, h>.
        """

    def forward_group(self, call: Call[R], group: Group[R], x: Tensor, saved: Saved, y: Tensor) -> None:
        D, I, adapters = x.shape[1], call.I, range(len(group.experts))

        # xA = x A1ᵀ beside the group's rows of x: [x | xA]
        x_rows = self.rows("x", group, D + call.Q, x.dtype)
        self.gather(x, group, x_rows)
        weights, index = _stack(call.gate_up, group, call.gate_up_adapter, "forward")
        if call.gate_up_adapter:
            A = call.gate_up_adapter.A[group.positions]
            self.nt(x_rows[:, :D], A, adapters, group, x_rows[:, D:])
            if saved.xA is not None:
                saved.xA[group.rows] = x_rows[:, D:]

        # gate_up = [x | xA] [W1 | B1]ᵀ = x W1ᵀ + (x A1ᵀ) B1ᵀ: base and adapter in one GEMM
        if saved.gate_up is not None:
            gate_up = saved.gate_up[group.rows]
        else:
            gate_up = self.rows("gate_up", group, 2 * I, x.dtype)
        self.nt(x_rows, weights[:, : 2 * I], index, group, gate_up)

        # h = silu(gate) · up, and hA = h A2ᵀ beside it: [h | hA]
        h_rows = self.rows("h", group, I + call.P, x.dtype)
        self.swiglu(gate_up, h_rows)
        weights, index = _stack(call.down, group, call.down_adapter, "forward")
        if call.down_adapter:
            A = call.down_adapter.A[group.positions]
            self.nt(h_rows[:, :I], A, adapters, group, h_rows[:, I:])
            if saved.hA is not None:
                saved.hA[group.rows] = h_rows[:, I:]

        # y[token] += w [h | hA] [W2 | B2]ᵀ
        out = self.product_rows("y", group, D, x.dtype)
        self.scatter_add(self.nt(h_rows, weights[:, :D], index, group, out), group, group.weight, y)

    def backward_group(
        self,
        call: Call[R],
        group: Group[R],
        x: Tensor,
        dy: Tensor,
        saved: Saved,
        score_n: Tensor,
        grads: Gradients,
        dx: Tensor | None,
    ) -> None:
        assert saved.gate_up is not None
        D, I, adapters = x.shape[1], call.I, range(len(group.experts))
        active = range(group.positions.start, group.positions.stop)  # the group's rows of grads.*_A and *_Bt

        # dh = dy W2 + (dy B2) A2, not yet times w: <dh, h> is the gradient of w
        dy_rows = self.rows("dy", group, D + call.P, x.dtype)
        self.gather(dy, group, dy_rows)
        weights, index = _stack(call.down, group, call.down_adapter, "backward")
        if call.down_adapter:
            Bt = call.down_adapter.Bt[group.positions]
            self.nt(dy_rows[:, :D], Bt, adapters, group, dy_rows[:, D:])
        out = self.product_rows("dh", group, I, x.dtype)
        dh = self.nn(dy_rows, weights[:, :, :I], index, group, out)

        # wh = w h; dgu = w times the gradient of gate_up; score = <dh, h>
        wh, dgu_rows = self.rows("wh", group, I, x.dtype), self.rows("dgu", group, 2 * I + call.Q, x.dtype)
        self.swiglu_backward(dh, saved.gate_up[group.rows], group, wh, dgu_rows, score_n[group.rows])

        # dA2 = (dy B2)ᵀ (w h); dB2ᵀ = (w hA)ᵀ dy; dW2 = dyᵀ (w h)
        if grads.down_A is not None and grads.down_Bt is not None and saved.hA is not None:
            whA = (saved.hA[group.rows] * group.weight[:, None]).to(x.dtype)
            self.tn(dy_rows[:, D:], wh, group, grads.down_A, active)
            self.tn(whA, dy_rows[:, :D], group, grads.down_Bt, active)
        if grads.down is not None:
            self.tn(dy_rows[:, :D], wh, group, grads.down, group.experts)

        # dx[token] += dgu W1 + (dgu B1) A1; w is in dgu already, hence the ones
        if dx is not None or call.gate_up_adapter:
            weights, index = _stack(call.gate_up, group, call.gate_up_adapter, "backward")
            if call.gate_up_adapter:
                Bt = call.gate_up_adapter.Bt[group.positions]
                self.nt(dgu_rows[:, : 2 * I], Bt, adapters, group, dgu_rows[:, 2 * I :])
            if dx is not None:
                out = self.product_rows("y", group, D, x.dtype)
                dx_rows = self.nn(dgu_rows, weights[:, :, :D], index, group, out)
                self.scatter_add(dx_rows, group, torch.ones_like(group.weight), dx)

        # dA1 = (dgu B1)ᵀ x; dB1ᵀ = xAᵀ dgu; dW1 = dguᵀ x
        if call.gate_up_adapter or grads.gate_up is not None:
            x_rows = self.rows("x", group, D, x.dtype)
            self.gather(x, group, x_rows)
            if grads.gate_up_A is not None and grads.gate_up_Bt is not None and saved.xA is not None:
                self.tn(dgu_rows[:, 2 * I :], x_rows, group, grads.gate_up_A, active)
                self.tn(saved.xA[group.rows], dgu_rows[:, : 2 * I], group, grads.gate_up_Bt, active)
            if grads.gate_up is not None:
                self.tn(dgu_rows[:, : 2 * I], x_rows, group, grads.gate_up, group.experts)


def _stack(
    base: Base, group: Group[R], adapter: Adapter | None, direction: Direction
) -> tuple[Tensor, Sequence[int]]:
    """Give (matrices, where each of the group's experts is among them).

    The weight itself if no expanding is needed, else a workspace.
    """
    dense = base.dense(adapter)
    if dense is not None:
        return dense, group.experts
    stack = base.stack(group.experts, group.positions, adapter, direction)
    return stack, range(len(group.experts))
