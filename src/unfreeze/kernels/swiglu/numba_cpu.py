"""SwiGLU on CPU as one loop per function, one row at a time while it is in cache.

Functions as in reference.py, float32 and bf16; activations other than SwiGLU of rows whose numbers lie side
by side go to the reference. Arrays are passed flat with the stride of their rows. In a
strided 2-D array numba doesn't know that a row's elements are contiguous; this way one compilation serves
contiguous and strided tensors.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from unfreeze.kernels.loops.numba_options import ONE, Kernel, flat_rows, narrow, sigmoid, widen
from unfreeze.kernels.swiglu import reference
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation
from unfreeze.kernels.swiglu.reference import backward_weighted

# on a CPU the experts' own loops (expert_mlp/numba_kernels) do the weighted one
__all__ = ["backward", "backward_weighted", "forward"]


@Kernel
def _forward(start, stop, gate, gate_stride, up, up_stride, h, h_stride, width):
    for r in range(start, stop):
        gates, ups = (
            gate[r * gate_stride : r * gate_stride + width],
            up[r * up_stride : r * up_stride + width],
        )
        target = h[r * h_stride : r * h_stride + width]
        for i in range(width):
            g = widen(gates[i])
            target[i] = narrow(np.float32(np.float32(g * sigmoid(g)) * widen(ups[i])), gates[i])


@Kernel
def _backward(
    start, stop, dh, dh_stride, gate, gate_stride, up, up_stride, dgate, dgate_stride, dup, dup_stride, width
):
    for r in range(start, stop):
        grads = dh[r * dh_stride : r * dh_stride + width]
        gates, ups = (
            gate[r * gate_stride : r * gate_stride + width],
            up[r * up_stride : r * up_stride + width],
        )
        dgates, dups = (
            dgate[r * dgate_stride : r * dgate_stride + width],
            dup[r * dup_stride : r * dup_stride + width],
        )
        for i in range(width):
            g, d = widen(gates[i]), widen(grads[i])
            s = sigmoid(g)
            silu = np.float32(g * s)
            slope = np.float32(s + np.float32(silu * np.float32(ONE - s)))
            dgates[i] = narrow(np.float32(np.float32(d * widen(ups[i])) * slope), gates[i])
            dups[i] = narrow(np.float32(d * silu), gates[i])


def forward(gate: Tensor, up: Tensor, h: Tensor, activation: Activation = SWIGLU) -> None:
    if activation != SWIGLU:
        reference.forward(gate, up, h, activation)
        return
    rows, width = gate.shape
    _forward(gate.numel(), rows, *flat_rows(gate), *flat_rows(up), *flat_rows(h), width)


def backward(
    dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, activation: Activation = SWIGLU
) -> None:
    if activation != SWIGLU:
        reference.backward(dh, gate, up, dgate, dup, activation)
        return
    rows, width = gate.shape
    _backward(
        gate.numel(),
        rows,
        *flat_rows(dh),
        *flat_rows(gate),
        *flat_rows(up),
        *flat_rows(dgate),
        *flat_rows(dup),
        width,
    )
