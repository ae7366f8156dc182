"""The inputs of one AdamW step: an AdamWUpdate per tensor, one AdamWRule for all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamWUpdate:
    """One tensor and its state, changed in place.

    master, exp_avg, exp_avg_sq  float32 (or wider), contiguous.
    gradient  float32, or its original half precision; not changed.
    weight    None, or the half precision weight that gets the rounded master.
    step      t of this update: 1 at the first.
    """

    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight: Tensor | None
    weight_decay: float
    step: int


@dataclass(frozen=True)
class AdamWRule:
    """The rule for all tensors. gradient_scale multiplies the gradients first (global norm clipping)."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    gradient_scale: float = 1.0


def numbers_of(u: AdamWUpdate, rule: AdamWRule) -> tuple[float, float, float]:
    """(1 - lr · decay, lr / (1 - b1^t), sqrt(1 - b2^t)): the numbers of one tensor's step."""
    beta1, beta2 = rule.betas
    return (
        1.0 - rule.learning_rate * u.weight_decay,
        rule.learning_rate / (1.0 - beta1**u.step),
        (1.0 - beta2**u.step) ** 0.5,
    )


def refuse_unread(updates: Sequence[AdamWUpdate], dtypes: Collection[torch.dtype]) -> None:
    """Raise ValueError for tensors that a loop over addresses would misread.

    Masters not in float32, state not contiguous, gradients or weights of other dtypes than `dtypes`.
    """
    for u in updates:
        if u.master.dtype != torch.float32 or not all(
            x.is_contiguous() for x in (u.master, u.exp_avg, u.exp_avg_sq)
        ):
            raise ValueError(f"adamw: {u.master.dtype} master, or state that is not contiguous")
        if u.gradient.dtype not in dtypes or (
            u.weight is not None and (u.weight.dtype not in dtypes or not u.weight.is_contiguous())
        ):
            raise ValueError(
                f"adamw: gradient in {u.gradient.dtype}, weight in"
                f" {u.weight.dtype if u.weight is not None else None}"
            )
