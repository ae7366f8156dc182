"""SwiGLU in plain torch: the oracle; it runs if no faster candidate is proven.

n rows, I intermediate width. gate and up are [n, I] with any row stride, so that the halves of a stacked [n,
2I] need no copy. Results go into the caller's memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(gate: Tensor, up: Tensor, h: Tensor) -> None:
    """h = silu(gate) · up, as torch rounds it: silu once, the product once."""
    torch.mul(F.silu(gate), up, out=h)


def backward(dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """dgate = dh · up · silu'(gate), dup = dh · silu(gate).

    silu'(g) = s + silu(g) (1 - s), s = sigmoid(g).
    """
    torch.mul(F.silu(gate), dh, out=dup)
    dgate.copy_(torch.ops.aten.silu_backward(dh * up, gate))


def backward_weighted(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    weight_n: Tensor,
    weighted: Tensor,
    dgate: Tensor,
    dup: Tensor,
    score_n: Tensor,
) -> None:
    """`backward` of rows whose h is multiplied by weight w *after* the next projection.

    From the unweighted dh, in float32, together with the inputs of w's gradient. weighted = w h (multiplied
    in the gradient of the next projection); dgate and dup times w; score = <dh, h> (the gradient of w).
    """
    wide, grad, weight_n1 = _wide(gate), _wide(dh), weight_n[:, None]
    silu = F.silu(wide)
    h = silu * up
    score_n.copy_((grad * h).sum(-1))
    weighted.copy_(h.mul_(weight_n1))
    grad = grad * weight_n1
    dup.copy_(silu.mul_(grad))
    dgate.copy_(torch.ops.aten.silu_backward(grad.mul_(up), wide))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
