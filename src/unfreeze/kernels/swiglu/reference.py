"""Gated activations in plain torch: the oracle; it runs if no faster candidate is proven.

n rows, I intermediate width. gate and up are [n, I] with any strides, so that the halves of a stacked [n, 2I]
or its interleaved columns need no copy. Results go into the caller's memory. SwiGLU and GeGLU are computed in
the tensors' dtype, the others in float32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.swiglu.activation import SWIGLU, Activation, GeGLU, SwiGLU


def forward(gate: Tensor, up: Tensor, h: Tensor, activation: Activation = SWIGLU) -> None:
    """h = a(gate, up). SwiGLU and GeGLU as torch rounds them: silu or gelu once, the product once."""
    if isinstance(activation, SwiGLU):
        torch.mul(F.silu(gate), up, out=h)
    elif isinstance(activation, GeGLU):
        torch.mul(F.gelu(gate, approximate="tanh"), up, out=h)
    else:
        h.copy_(activation.forward(_wide(gate), _wide(up)))


def backward(
    dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, activation: Activation = SWIGLU
) -> None:
    """The gradients of gate and up. SwiGLU: dgate = dh · up · silu'(gate), dup = dh · silu(gate).

    silu'(g) = s + silu(g) (1 - s), s = sigmoid(g).
    """
    if isinstance(activation, SwiGLU):
        torch.mul(F.silu(gate), dh, out=dup)
        torch.ops.aten.silu_backward.grad_input(dh * up, gate, grad_input=dgate)
    elif isinstance(activation, GeGLU):
        torch.mul(F.gelu(gate, approximate="tanh"), dh, out=dup)
        torch.ops.aten.gelu_backward.grad_input(dh * up, gate, approximate="tanh", grad_input=dgate)
    else:
        _, of_gate, of_up = activation.backward(_wide(dh), _wide(gate), _wide(up))
        dgate.copy_(of_gate)
        dup.copy_(of_up)


def backward_weighted(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    weight_n: Tensor,
    weighted: Tensor,
    dgate: Tensor,
    dup: Tensor,
    score_n: Tensor,
    activation: Activation = SWIGLU,
) -> None:
    """`backward` of rows whose h is multiplied by weight w *after* the next projection.

    From the unweighted dh, in float32, together with the inputs of w's gradient. weighted = w h (multiplied
    in the gradient of the next projection); dgate and dup times w; score = <dh, h> (the gradient of w).
    """
    wide, grad, weight_n1 = _wide(gate), _wide(dh), weight_n[:, None]
    if isinstance(activation, SwiGLU):
        silu = F.silu(wide)
        h = silu * up
        score_n.copy_((grad * h).sum(-1))
        grad = grad * weight_n1  # before `weighted` is written, which may be dh's memory
        weighted.copy_(h.mul_(weight_n1))
        dup.copy_(silu.mul_(grad))
        dgate.copy_(torch.ops.aten.silu_backward(grad.mul_(up), wide))
        return
    h, of_gate, of_up = activation.backward(grad, wide, _wide(up))
    score_n.copy_((grad * h).sum(-1))
    weighted.copy_(h.mul_(weight_n1))
    dgate.copy_(of_gate.mul_(weight_n1))
    dup.copy_(of_up.mul_(weight_n1))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
