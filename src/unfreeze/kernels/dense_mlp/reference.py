"""The dense block as the models' own code goes through it, op by op.

tests/models/blocks/test_mlp.py holds the two equal to the bit. T rows, D model width, I intermediate width, R
adapter rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.rms_norm import rms_norm
from unfreeze.kernels.swiglu import swiglu


@dataclass(frozen=True)
class Projection:
    """x Wᵀ + b + scale · (x Aᵀ) Bᵀ.

    weight [out, in], bias [out] or None, A [R, in] and B [out, R] or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    A: Tensor | None = None
    B: Tensor | None = None
    scale: float = 1.0


def dense_mlp(
    x_TD: Tensor, norm_D: Tensor, eps: float, gate: Projection, up: Projection, down: Projection
) -> Tensor:
    """x + down(swiglu(gate(n), up(n))), n = rms_norm(x)."""
    n_TD = rms_norm(x_TD, norm_D, eps)
    return x_TD + projected(swiglu(projected(n_TD, gate), projected(n_TD, up)), down)


def projected(x_TI: Tensor, by: Projection) -> Tensor:
    y_TO = F.linear(x_TI, by.weight, by.bias)
    if by.A is None or by.B is None:
        return y_TO
    return torch.addmm(y_TO, F.linear(x_TI, by.A.to(x_TI.dtype)) * by.scale, by.B.to(x_TI.dtype).t())
