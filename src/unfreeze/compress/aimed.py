"""Codes that keep the length of ΔW: `unfreeze merge --rounding change`.

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
from collections.abc import Mapping

import torch
from torch import Tensor

from unfreeze.quant.codec import Codec
from unfreeze.quant.kept import can_keep, kept, on_scales, refitted
from unfreeze.quant.requantize import row_blocks

LARGEST = 2.0**20  # c at most; a step of INT4 is some 0.4 standard deviations of W
HALVINGS = 20  # of log2 c: to 1 part in 75,000

Parts = Mapping[str, Tensor]
Ways = Mapping[str, tuple[dict[str, Tensor], int]]
"""Way of rounding W + ΔW -> (parts, number of new scales); "keep" where the format can keep its scales."""


def aimed(codec: Codec, w: Tensor, delta: Tensor, ways: Ways) -> tuple[dict[str, Tensor], int]:
    """(codes of w + delta on the scales that "keep" has chosen, new scales); on fresh scales if none can."""
    if "keep" not in ways:
        return refitted(codec, w + delta, ways["refit"][0]), 0
    parts, anew = ways["keep"]
    return on_scales(codec, w + delta, parts), anew


def factor_of(codec: Codec, W: Tensor, change: Tensor, stored: Parts) -> float:
    """c of a matrix, found on its first 2^19 weights that change; LARGEST if no code would move."""
    for first, last, parts in row_blocks(codec, *W.shape, stored):
        w, delta = W[first:last], change[first:last]
        if delta.any():
            return _smallest(codec, w, delta, parts)
    return 1.0


def _smallest(codec: Codec, w: Tensor, delta: Tensor, parts: Parts) -> float:
    """`factor_of` these rows, by halving log2 c."""
    fresh = refitted(codec, w + delta, parts)
    ways: dict[str, tuple[dict[str, Tensor], int]] = {"refit": (fresh, 0)}
    if can_keep(codec):
        ways["keep"] = kept(codec, w + delta, parts, fresh)
    whole = float((delta * delta).sum(dtype=torch.float64))

    def enough(log: float) -> bool:
        requantized, _ = aimed(codec, w, 2.0**log * delta, ways)
        moved = codec.dequantize(requantized).float() - w
        return float((moved * delta).sum(dtype=torch.float64)) >= whole

    low, high = 0.0, math.log2(LARGEST)
    if enough(low):
        return 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return 2.0**high
