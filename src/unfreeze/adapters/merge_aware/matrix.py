"""Ŵ = Q(W + ΔW) of one matrix, by the functions that a merge calls (quant/requantize.py).

W is the base's dequantized weight. Shapes: W, ΔW, Ŵ [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from unfreeze.kernels.expand import expand
from unfreeze.kernels.int4_requantize import factor_int4, requantize_int4, rounds
from unfreeze.quant.aimed import aimed, factor_of
from unfreeze.quant.codec import Codec, Packed
from unfreeze.quant.halves import HALVES, Halves, stacked
from unfreeze.quant.int4 import Int4
from unfreeze.quant.kept import kept, refitted
from unfreeze.quant.requantize import Scales, below, requantized, row_blocks


@dataclass(frozen=True)
class Rounding:
    """The rounding of a matrix when it is merged.

    to      the format that is written, if it is another than the base's; None: the base's own
    scales  of the base's own format: refit for W + ΔW, or keep the base's where they hold it; keep-change:
            these, with codes that hold the length of ΔW
    halves  True if the matrix is two on disk (gate above up), each rounded for itself
    """

    to: Codec | None = None
    scales: Scales = "refit"
    halves: bool = False


Lengths = dict[int, float]
"""Number of a matrix on disk (0, or 0 and 1 of gate and up) -> its factor c of keep-change."""


def rounded(
    base: Tensor | Packed, change: Tensor, rounding: Rounding, out: Tensor, known: Lengths | None = None
) -> Tensor:
    """out = Q(W + ΔW) in out's dtype; returns `out`. change: ΔW in float32; it is overwritten.

    known: the factors that a pass before has found for this ΔW; those that are missing are added.
    As in a merge a matrix that does not change keeps its bytes, if it keeps its format. If ΔW is not finite
    Ŵ is NaN: the loss then shows it.
    """
    known = {} if known is None else known
    for number, (half, delta, place) in enumerate(_halves(base, change, out, rounding.halves)):
        low, high = map(float, torch.aminmax(delta))  # torch.any takes five times as long on a CPU
        if not (isfinite(low) and isfinite(high)):
            place.fill_(torch.nan)
        elif rounding.to is None:
            assert isinstance(half, Packed)
            if low == high == 0:
                place.copy_(half.dequantize())
            else:
                aims = rounding.scales == "keep-change"
                w = _float(half) if aims else None
                if w is not None and number not in known:
                    known[number] = _factor(half, w, delta)
                _in_place(half, delta, rounding.scales, place, known.get(number, 1.0), w)
        else:
            _into(half, delta, rounding.to, place)
    return out


def rounded_codes(base: Tensor | Packed, change: Tensor, rounding: Rounding) -> Packed:
    """Q(W + ΔW) as the parts of its format; `rounded` has the same numbers. change is overwritten."""
    if rounding.to is not None:
        codec = stacked(rounding.to, *change.shape) if rounding.halves else rounding.to
        w = change.add_((base.dequantize() if isinstance(base, Packed) else base).float())
        return Packed(codec, codec.quantize(w))
    assert isinstance(base, Packed)
    halves = _halves(base, change, change, rounding.halves)
    own = [
        _parts_in_place(half, delta, rounding.scales) for half, delta, _ in halves if isinstance(half, Packed)
    ]
    if isinstance(base.codec, Halves):
        named = zip(HALVES, own, strict=True)
        return Packed(
            base.codec, {f"{half}{suffix}": part for half, of in named for suffix, part in of.items()}
        )
    return Packed(base.codec, {suffix: below([parts[suffix] for parts in own]) for suffix in own[0]})


def _parts_in_place(base: Packed, change: Tensor, scales: Scales) -> dict[str, Tensor]:
    """The parts of Q in W's own format."""
    if not change.any():
        return dict(base.parts)
    factor = _factor(base, _float(base), change) if scales == "keep-change" else 1.0
    blocks = [block for _, _, block in _blocks(base, change, scales, factor)]
    return {suffix: below([block[suffix] for block in blocks]) for suffix in blocks[0]}


def _halves(
    base: Tensor | Packed, change: Tensor, out: Tensor, halves: bool
) -> Iterator[tuple[Tensor | Packed, Tensor, Tensor]]:
    """(base, ΔW, Ŵ) of each matrix on disk."""
    if isinstance(base, Packed) and isinstance(base.codec, Halves):
        own = (Packed(codec, parts) for codec, parts in base.codec.each(base.parts))
    elif not halves:
        yield base, change, out
        return
    elif isinstance(base, Packed):  # parts of a stack are those of gate above those of up (quant/halves.py)
        cut = {suffix: part.chunk(2) for suffix, part in base.parts.items()}
        own = (Packed(base.codec, {suffix: part[i] for suffix, part in cut.items()}) for i in (0, 1))
    else:
        own = iter(base.chunk(2))
    yield from zip(own, change.chunk(2), out.chunk(2), strict=True)


def _float(base: Packed) -> Tensor:
    return expand(base, None, torch.empty(base.shape[-2:], device=base.device))


def _factor(base: Packed, w: Tensor, change: Tensor) -> float:
    """c of keep-change. w: W in float32."""
    if isinstance(base.codec, Int4) and rounds(base.codec, change, w):
        return factor_int4(base.codec, w, change, base)
    return factor_of(base.codec, w, change, base.parts)


def _in_place(
    base: Packed, change: Tensor, scales: Scales, out: Tensor, factor: float, own: Tensor | None
) -> None:
    """Q in W's own format. factor, own: c of keep-change, and W in float32 there."""
    codec = base.codec
    if rounds(codec, change, out):
        if own is not None:
            requantize_int4(codec, own, out, base, change, factor)
        else:
            w = change.add_(expand(base, None, out))
            requantize_int4(codec, w, out, base if scales == "keep" else None)
        return
    for first, last, parts in _blocks(base, change, scales, factor):
        out[first:last].copy_(codec.dequantize(parts))


def _blocks(
    base: Packed, change: Tensor, scales: Scales, factor: float
) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """(first row, last, their parts of Q)."""
    codec = base.codec
    for first, last, parts in row_blocks(codec, change.shape, base.parts):
        w, delta = codec.dequantize(parts).float(), change[first:last]
        if scales == "keep-change":
            on = kept(codec, w + delta, parts, refitted(codec, w + delta, parts))
            yield first, last, aimed(codec, w + factor * delta, on)[0]
        else:
            yield first, last, requantized(codec, delta.add_(w), parts, scales)


def _into(base: Tensor | Packed, change: Tensor, to: Codec, out: Tensor) -> None:
    """Q in another format, whose scales are all new."""
    w = change.add_((base.dequantize() if isinstance(base, Packed) else base).float())
    if rounds(to, w, out):
        requantize_int4(to, w, out)
        return
    for first, last, _ in row_blocks(to, w.shape, {}):
        out[first:last].copy_(to.dequantize(to.quantize(w[first:last])))


def product(A: Tensor, B: Tensor, scale: float) -> Tensor:
    """ΔW = scale · B A in float32, in a merge's order of operations: the same bits."""
    return torch.mm(B.detach().float(), A.detach().float()).mul_(scale)
