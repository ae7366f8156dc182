"""Q(w) in INT4 as one loop over a matrix: absmax, scale, codes and their numbers, group by group.

As Int4.quantize and quant/kept.py, bit for bit, for scales in bf16. Training rounds every adapted weight
twice a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.loops.numba_options import LANES, Kernel, array, inlined, serial
from unfreeze.quant.aimed import NEAR, factor_of, smallest
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import GRID_MAX, MAX_SCALE, OFFSET, Int4
from unfreeze.quant.requantize import row_blocks

SEVEN, EIGHT = np.float32(GRID_MAX), np.float32(OFFSET)
LARGEST = np.float32(MAX_SCALE)
INTEGERS = np.float32(1.5 * 2**23)  # added and taken away it leaves a whole number, half to even
UNSURE = 1e-9  # relative; sums of 2^19 numbers in another order differ by less
SIZE, INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


@inlined
def to_bf16(value):
    """The bits of float32 `value`, rounded to bf16, ties to even."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000))


@inlined
def code_of(w, scale, low, high):
    """round(w / scale), half to even, in low..high; scale is not 0."""
    step = min(max(np.float32(w / scale), np.float32(-16)), np.float32(16))
    whole = np.float32(np.float32(step + INTEGERS) - INTEGERS)
    return min(max(whole, low), high)


@inlined
def absmax_bits(w):
    """The bits of the largest |w|; from INFINITE on, one is not finite."""
    largest = np.uint32(0)
    for i in range(w.size):
        largest = max(largest, np.uint32(np.float32(w[i]).view(np.uint32) & SIZE))
    return largest


@inlined
def exact(w, scale):
    """True if the group's numbers are codes times this scale."""
    same = True
    for i in range(w.size):
        number = np.uint32(to_bf16(np.float32(code_of(w[i], scale, -SEVEN, SEVEN) * scale))).view(np.float32)
        same = same and number == w[i]
    return same


@inlined
def refit(w, absmax):
    """Int4.quantize's scale of a group: bf16(absmax / 7), or a neighbour that alone reproduces the group."""
    scale = np.uint32(to_bf16(min(np.float32(absmax / SEVEN), LARGEST))).view(np.float32)
    if scale == 0 or np.uint32(np.float32(absmax).view(np.uint32) & np.uint32(0xFFFF)) != 0:
        return scale  # neither has such a neighbour: its largest number is in bf16
    for step in (-65536, 65536):
        bits = np.uint32(np.int64(np.float32(scale).view(np.uint32)) + np.int64(step))
        other = np.uint32(bits).view(np.float32)
        if other > 0:
            code = min(np.float32(np.rint(np.float32(absmax / other))), SEVEN)
            largest = np.uint32(to_bf16(np.float32(code * other))).view(np.float32)
            if largest == absmax and exact(w, other) and not exact(w, scale):
                scale = other
    return scale


@inlined
def held(w, scale):
    """True if codes -8..7 hold every w of the group on this scale within half a step (quant/kept.py)."""
    if scale == 0:
        zeros = True
        for i in range(w.size):
            zeros = zeros and w[i] == 0
        return zeros
    inside = True
    for i in range(w.size):
        step = np.float32(w[i] / scale)
        inside = inside and step <= EIGHT - np.float32(0.5) and step >= -EIGHT - np.float32(0.5)
    return inside


@Kernel
def _round(start, stop, w, change, factor, scales, keep, group, out32, out16, stride):
    """w float32 [N, M]; scales uint16 [N, G], the base's: read if `keep`.

    change: float32 [N, M] or empty. With one, scales are those of w + change, codes of w + factor · change.
    out: float32 bits, or bf16's in out16 (the other is empty), flat with that stride of a row.
    """
    narrow, aims = out16.size > 0, change.size > 0
    both, aim = np.empty(group, np.float32), np.empty(group, np.float32)
    for row in range(start, stop):
        for g in range(w.shape[1] // group):
            first = g * group
            own = w[row, first : first + group]
            if aims:
                delta = change[row, first : first + group]
                for i in range(group):
                    both[i] = np.float32(own[i] + delta[i])
                    aim[i] = np.float32(own[i] + np.float32(factor * delta[i]))
                own = both
            old = np.float32(0)
            if keep:
                old = np.uint32(np.uint32(scales[row, g]) << np.uint32(16)).view(np.float32)
            largest = absmax_bits(own)
            low, high = -SEVEN, SEVEN
            scale = old
            if keep:
                low, high = -EIGHT, SEVEN
            if largest < INFINITE and not (keep and held(own, old)):
                scale = refit(own, np.uint32(largest).view(np.float32))
            divisor = np.float32(1) if scale == 0 else scale
            place = row * stride + first
            if largest >= INFINITE:  # the loss shows it
                scale, divisor = np.float32(np.nan), np.float32(1)
            if aims:
                own = aim
            if narrow:
                shorts = out16[place : place + group]
                for i in range(group):
                    number = to_bf16(np.float32(code_of(own[i], divisor, low, high) * scale))
                    shorts[i] = np.uint16(number >> np.uint32(16))
            else:
                words = out32[place : place + group]
                for i in range(group):
                    words[i] = to_bf16(np.float32(code_of(own[i], divisor, low, high) * scale))


@serial
def _steps(w, change, scales, group, steps, along):
    """steps = |ΔW| / s and along = s |ΔW| of each weight -> ‖ΔW‖²; NaN if a group is not finite.

    w, change float32 [N, M]; s as in `_round`. steps, along float32 [N M].
    """
    both, whole = np.empty(group, np.float32), np.float64(0)
    for row in range(w.shape[0]):
        for g in range(w.shape[1] // group):
            first = g * group
            own, delta = w[row, first : first + group], change[row, first : first + group]
            for i in range(group):
                both[i] = np.float32(own[i] + delta[i])
            largest = absmax_bits(both)
            if largest >= INFINITE:
                return np.float64(np.nan)
            scale = np.uint32(np.uint32(scales[row, g]) << np.uint32(16)).view(np.float32)
            if not held(both, scale):
                scale = refit(both, np.uint32(largest).view(np.float32))
            divisor = np.float32(np.inf) if scale == 0 else scale
            square = np.float32(scale * scale)
            place = row * w.shape[1] + first
            for i in range(group):
                step = np.float32(abs(np.float32(delta[i] / divisor)))
                steps[place + i] = step
                along[place + i] = np.float32(step * square)
                whole += np.float64(np.float32(delta[i] * delta[i]))
    return whole


@serial
def _length(steps, along, c):
    """Σ round(c · steps) · along, float32 products summed in float64."""
    sums = np.zeros(LANES, np.float64)
    whole = steps.size - steps.size % LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            steps_c = np.float32(np.rint(np.float32(steps[first + lane] * c)))
            sums[lane] += np.float64(np.float32(steps_c * along[first + lane]))
    for i in range(whole, steps.size):
        sums[0] += np.float64(np.float32(np.float32(np.rint(np.float32(steps[i] * c))) * along[i]))
    return sums.sum()


def rounds(codec: object, w: Tensor, out: Tensor) -> bool:
    """True if this loop rounds into that format: INT4 with scales in bf16, on a CPU."""
    return (
        isinstance(codec, Int4)
        and codec.scale_dtype == "BF16"
        and codec.group_size % 2 == 0
        and w.device.type == "cpu"
        and w.is_contiguous()
        and out.stride(-1) == 1
        and out.dtype in (torch.float32, torch.bfloat16)
    )


def requantize_int4(
    codec: object,
    w: Tensor,
    out: Tensor,
    keep: Packed | None = None,
    change: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """out = the numbers of Q(w), in bf16 or float32; w [N, M] float32, of which `rounds` is true.

    keep: a base whose scales are used where they hold w. A group with a number that is not finite is NaN.
    change [N, M]: scales are chosen for w + change, and codes for w + factor · change (quant/aimed.py).
    """
    assert isinstance(codec, Int4)
    rows, columns = w.shape
    scales = np.empty((0, 0), np.uint16) if keep is None else array(keep.parts["weight_scale"].contiguous())
    flat = out.as_strided(((rows - 1) * out.stride(0) + columns,), (1,))
    narrow = out.dtype == torch.bfloat16
    out32 = np.empty(0, np.uint32) if narrow else array(flat).view(np.uint32)
    out16 = array(flat) if narrow else np.empty(0, np.uint16)
    delta = np.empty((0, 0), np.float32) if change is None else array(change)
    own = array(w), delta, np.float32(factor), scales, keep is not None, codec.group_size
    _round(w.numel(), rows, *own, out32, out16, out.stride(0))


def factor_int4(codec: Int4, w: Tensor, change: Tensor, base: Packed) -> float:
    """c of quant/aimed.py: factor_of, the same bits. w, change [N, M] float32, of which `rounds` is true.

    Sums here have another order. Where that could decide differently, factor_of itself is asked.
    """
    for first, last, parts in row_blocks(codec, w.shape, base.parts):
        steps, along = np.empty((2, (last - first) * w.shape[1]), np.float32)
        scales = array(parts["weight_scale"].contiguous())
        own = array(w[first:last]), array(change[first:last]), scales, codec.group_size
        whole = _steps(*own, steps, along)
        if whole == 0:
            continue
        unsure = not np.isfinite(whole)

        def length(c: float, steps: Any = steps, along: Any = along, whole: float = whole) -> float:
            nonlocal unsure
            sum = _length(steps, along, np.float32(c))
            unsure |= not min(abs(sum / whole - 1), abs(sum / whole - 1 - NEAR)) > UNSURE
            return sum

        factor = smallest(length, whole)
        return factor_of(codec, w, change, base.parts) if unsure else factor
    return 1.0
