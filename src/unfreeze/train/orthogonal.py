"""Muon's arithmetic: momentum, Newton-Schulz, the update. One matrix [out, in] or a stack [E, out, in].

B = mu B + (1 - mu) g;  u = (1 - mu) g + mu B;  O = orthogonal(u);  w = w (1 - lr decay) - lr s O

That of torch.optim.Muon, in its order of operations. Sources: Jordan 2024, "Muon: An optimizer for hidden
layers in neural networks"; Liu et al., "Muon is scalable for LLM training", arXiv:2502.16982.
"""

# torch's vector_norm and mT are untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unfreeze.models.matrices import STEPS

Scale = Literal["match_rms_adamw", "original"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic a x + b x³ + c x⁵: steepest at 0 (Jordan 2024)
SMALLEST = 1e-7  # a smaller norm counts as this


@dataclass(frozen=True)
class MuonRule:
    """Settings of Muon.

    momentum  mu
    scale     s of an update O, whose singular values are about 1. match_rms_adamw: 0.2 sqrt(max(out, in)), so
              an update is as large as AdamW's and the same learning rates serve both.
              original: sqrt(max(1, out / in))
    adamw_rate  learning rate of the weights that AdamW updates, over that of the matrices
    dtype     of Newton-Schulz; None: bfloat16, as torch does, where the device multiplies it, else float32
    """

    momentum: float = 0.95
    scale: Scale = "match_rms_adamw"
    adamw_rate: float = 1.0
    dtype: torch.dtype | None = None


def scale_of(kind: Scale, shape: Sequence[int]) -> float:
    """Return s for a matrix, or for each matrix of a stack."""
    out, inside = shape[-2:]
    return 0.2 * math.sqrt(max(out, inside)) if kind == "match_rms_adamw" else math.sqrt(max(1, out / inside))


@torch.no_grad()
def direction(momentum: Tensor, gradient: Tensor, mu: float) -> Tensor:
    """Move the momentum towards the gradient, in place; return u, Nesterov's look ahead."""
    momentum.lerp_(gradient, 1 - mu)
    return gradient.lerp(momentum, mu)


@torch.no_grad()
def orthogonal(u: Tensor, dtype: torch.dtype) -> Tensor:
    """Return about U Vᵀ of u = U S Vᵀ, of each matrix of a stack: singular values of 0.7 to 1.2.

    Five Newton-Schulz steps X = a X + (b A + c A²) X with A = X Xᵀ, from X = u / |u|, in `dtype`.
    """
    x: Tensor = u.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST)
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@torch.no_grad()
def apply(master: Tensor, o: Tensor, learning_rate: float, decay: float, scale: float) -> None:
    """Update the weights in place: decay, then the step along O."""
    master.mul_(1 - learning_rate * decay)
    master.add_(o, alpha=-learning_rate * scale)
