"""Codes that keep the length of ΔW: `--scales keep-change` of a merge and of merge-aware training.

W is on its own grid, so rounding W + ΔW to the nearest code drops every element of ΔW below half a step. Here
W + c ΔW is rounded instead, on the scales that "keep" has chosen, with the smallest c >= 1 (one per matrix)
that makes

    kept = <Q(W + c ΔW) − W, ΔW> / ‖ΔW‖² = 1

The elements nearest to the next code move, as many as hold the length of ΔW; the rest of the change is noise.
Moving the largest elements has less of it than any other choice of elements to move by one code, such as
stochastic rounding. With c = 1 it is the nearest code.

Shapes: W, ΔW [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from unfreeze.quant.codec import Codec
from unfreeze.quant.int4 import Int4
from unfreeze.quant.kept import kept, on_scales, refitted
from unfreeze.quant.requantize import row_blocks

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 2.0**20  # c at most; a step of INT4 is some 0.4 standard deviations of W
NEAR = 0.01  # kept is at most this much above 1

Parts = Mapping[str, "Tensor"]


def aimed(codec: Codec, weight: Tensor, on: tuple[dict[str, Tensor], int]) -> tuple[dict[str, Tensor], int]:
    """(codes of W + c ΔW, number of new scales). on: the same of W + ΔW by "keep", whose scales are used."""
    parts, anew = on
    return on_scales(codec, weight, parts), anew


def factor_of(codec: Codec, W: Tensor, change: Tensor, stored: Parts) -> float:
    """c of a matrix, found on its first 2^19 weights that change; LARGEST if no code would move.

    1 if nothing changes; rows whose change is not finite tell nothing.
    """
    for first, last, parts in row_blocks(codec, W.shape, stored):
        w, delta = W[first:last], change[first:last]
        if 0 < (whole := squares(delta)) < math.inf:
            on = kept(codec, w + delta, parts, refitted(codec, w + delta, parts))
            uniform = isinstance(codec, Int4)
            share = _of_steps(codec, delta, on[0]) if uniform else _of_codes(codec, w, delta, on)
            return smallest(share, whole)
    return 1.0


def squares(delta: Tensor) -> float:
    """‖ΔW‖², float32 squares summed in float64."""
    import torch

    return float(delta.square().sum(dtype=torch.float64))


def smallest(length: Callable[[float], float], whole: float) -> float:
    """The smallest c >= 1 with length(c) / whole in [1, 1 + NEAR], by halving log2 c; else LARGEST."""
    low, high = 0.0, math.log2(LARGEST)
    if length(1.0) / whole >= 1:
        return 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        of = length(2.0**middle) / whole
        low, high = (low, middle) if of >= 1 else (middle, high)
        if 1 <= of < 1 + NEAR:
            break
    return 2.0**high


def _of_steps(codec: Int4, delta: Tensor, parts: Parts) -> Callable[[float], float]:
    """c -> kept · ‖ΔW‖² if all codes of a group are one step s apart and none is the outermost: none is made.

    Σ s² round(c |ΔW| / s) |ΔW| / s
    """
    import torch

    scale = parts["weight_scale"].float().repeat_interleave(codec.group_size, -1)
    steps = (delta / torch.where(scale == 0, torch.inf, scale)).abs()
    along = steps * scale.square()
    return lambda c: float(((steps * c).round_() * along).sum(dtype=torch.float64))


def _of_codes(
    codec: Codec, w: Tensor, delta: Tensor, on: tuple[dict[str, Tensor], int]
) -> Callable[[float], float]:
    """c -> kept · ‖ΔW‖², on any grid."""
    import torch

    def length(c: float) -> float:
        moved = codec.dequantize(aimed(codec, w + c * delta, on)[0]).float() - w
        return float((moved * delta).sum(dtype=torch.float64))

    return length
