"""A group of experts as GEMMs over expanded (or dense) matrices: what the parts for CUDA and for any CPU
share.

This file has the order of the operations. A part brings the operations themselves: `rows` (a buffer), `nt`,
`nn`, `tn` (a GEMM per expert), `gather`, `scatter_add`, `swiglu` and `swiglu_backward`. Names and shapes as
in fused.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp.factors import Adapter, width
from unfreeze.kernels.expert_mlp.workspace import Base, Direction


class ByGemms:
    """Forward and backward of one group, for a part to inherit."""

    nt: Any
    nn: Any
    tn: Any
    rows: Any
    gather: Any
    scatter_add: Any
    swiglu: Any
    swiglu_backward: Any

    def forward_group(self, call: Any, group: Any, x: Tensor, kept: tuple[Tensor | None, ...], y: Tensor) -> None:
        """Adds the group's share to y [T, D] float32; its rows of gate_up, xA and hA go to `kept` where there is room for them."""
        D, I = x.shape[1], call.down.columns
        gate_up_n, xA_n, hA_n = kept
        Q, P = width(call.gate_up_adapter), width(call.down_adapter)
        # gate_up = [x | xA] [W1 | B1]ᵀ = x W1ᵀ + (x A1ᵀ) B1ᵀ: base and adapter in one GEMM
        x_rows = self.rows("x", group, D + Q, x.dtype)
        self.gather(x, group, x_rows)
        weights, index = _stack(call.gate_up, group, call.gate_up_adapter, "forward")
        if call.gate_up_adapter:
            self.nt(x_rows[:, :D], call.gate_up_adapter.A[group.positions], range(len(group.experts)), group, x_rows[:, D:])
            if xA_n is not None:
                xA_n[group.rows] = x_rows[:, D:]
        gate_up = gate_up_n[group.rows] if gate_up_n is not None else self.rows("gate_up", group, 2 * I, x.dtype)
        self.nt(x_rows, weights[:, : 2 * I], index, group, gate_up)

        # h = silu(gate) · up, then y[token] += weight · [h | hA] [W2 | B2]ᵀ
        h_rows = self.rows("h", group, I + P, x.dtype)
        self.swiglu(gate_up, h_rows)
        weights, index = _stack(call.down, group, call.down_adapter, "forward")
        if call.down_adapter:
            self.nt(h_rows[:, :I], call.down_adapter.A[group.positions], range(len(group.experts)), group, h_rows[:, I:])
            if hA_n is not None:
                hA_n[group.rows] = h_rows[:, I:]
        y_rows = self.nt(h_rows, weights[:, :D], index, group, self.rows("y", group, D, x.dtype))
        self.scatter_add(y_rows, group, group.weight, y)

    def backward_group(
        self, call: Any, group: Any, x: Tensor, dy: Tensor, saved: tuple[Tensor | None, ...], score_n: Tensor, grads: Any, dx: Tensor | None
    ) -> None:  # fmt: skip
        """The group's rows of score_n, its experts in `grads`, and its share of dx [T, D] float32 (None: not asked for)."""
        D, I = x.shape[1], call.down.columns
        gate_up_n, xA_n, hA_n = saved
        Q, P, here = width(call.gate_up_adapter), width(call.down_adapter), range(group.positions.start, group.positions.stop)
        # dh = dy W2 + (dy B2) A2, without the routing weight: <dh, h> is that weight's gradient
        dy_rows = self.rows("dy", group, D + P, x.dtype)
        self.gather(dy, group, dy_rows)
        adapters = range(len(group.experts))
        weights, index = _stack(call.down, group, call.down_adapter, "backward")
        if call.down_adapter:
            self.nt(dy_rows[:, :D], call.down_adapter.Bt[group.positions], adapters, group, dy_rows[:, D:])
        dh = self.nn(dy_rows, weights[:, :, :I], index, group, self.rows("dh", group, I, x.dtype))

        assert gate_up_n is not None
        # h = silu(gate) · up, now with the weight w: wh = w h, dgu = gradient of gate_up, score = <dh, h>
        wh, dgu_rows = self.rows("wh", group, I, x.dtype), self.rows("dgu", group, 2 * I + Q, x.dtype)
        self.swiglu_backward(dh, gate_up_n[group.rows], group, wh, dgu_rows, score_n[group.rows])
        # dA2 = (dy B2)ᵀ (w h), dB2ᵀ = (w hA)ᵀ dy, dW2 = dyᵀ (w h)
        if call.down_adapter and hA_n is not None:
            whA = (hA_n[group.rows] * group.weight[:, None]).to(x.dtype)
            self.tn(dy_rows[:, D:], wh, group, grads.down_A, here)
            self.tn(whA, dy_rows[:, :D], group, grads.down_Bt, here)
        if grads.down is not None:
            self.tn(dy_rows[:, :D], wh, group, grads.down, group.experts)

        # dx[token] += dgu W1 + (dgu B1) A1; dgu holds the routing weight already, hence the ones
        if dx is not None or call.gate_up_adapter:
            weights, index = _stack(call.gate_up, group, call.gate_up_adapter, "backward")
            if call.gate_up_adapter:
                self.nt(dgu_rows[:, : 2 * I], call.gate_up_adapter.Bt[group.positions], adapters, group, dgu_rows[:, 2 * I :])
            if dx is not None:
                dx_rows = self.nn(dgu_rows, weights[:, :, :D], index, group, self.rows("y", group, D, x.dtype))
                self.scatter_add(dx_rows, group, torch.ones_like(group.weight), dx)
        # dA1 = (dgu B1)ᵀ x, dB1ᵀ = xAᵀ dgu, dW1 = dguᵀ x
        if call.gate_up_adapter or grads.gate_up is not None:
            x_rows = self.rows("x", group, D, x.dtype)
            self.gather(x, group, x_rows)
            if call.gate_up_adapter and xA_n is not None:
                self.tn(dgu_rows[:, 2 * I :], x_rows, group, grads.gate_up_A, here)
                self.tn(xA_n[group.rows], dgu_rows[:, : 2 * I], group, grads.gate_up_Bt, here)
            if grads.gate_up is not None:
                self.tn(dgu_rows[:, : 2 * I], x_rows, group, grads.gate_up, group.experts)


def _stack(base: Base, group: Any, adapter: Adapter | None, direction: Direction) -> tuple[Tensor, Any]:
    """(matrices, where each of the group's experts is among them): the weight itself if no expanding is
    needed, else a workspace."""
    if base.direct(adapter):
        return base.weight, group.experts  # type: ignore[return-value]
    return base.stack(group.experts, group.positions, adapter, direction), range(len(group.experts))
