"""What one AdamW step is given: per tensor an Update, for all of them a Rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """One tensor and its state, changed in place. master, exp_avg, exp_avg_sq: float32 (or wider), contiguous.

    gradient  float32, or the half precision it arrived in; not changed.
    weight    None, or the half precision weight that gets the rounded master.
    step      t, of this update: 1 at the first.
    """

    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    weight: Tensor | None
    weight_decay: float
    step: int


@dataclass(frozen=True)
class Rule:
    """gradient_scale: what gradients are multiplied by first (clipping by the global norm)."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    gradient_scale: float = 1.0
