"""Parts of the Triton expanders: numbers from codes, scales from their bytes, results rounded as formats do.

Nothing here is launched: triton_cuda.py and int4_grouped_mm call it. BY_HAND: True in the interpreter. Its
own conversions between float32 and bf16 cut digits off and make zeros of subnormal numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(x):
    """bf16 -> float32 by its bits, including subnormals."""
    bits = x.to(tl.int16, bitcast=True)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x, BY_HAND: tl.constexpr):
    """float32 -> the nearest bf16, ties to even, as float32. BY_HAND: in integers."""
    if BY_HAND:
        bits = x.to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        rounded = (((bits + 0x7FFF + odd) >> 16) << 16).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def put(target, x, inside, ROUND: tl.constexpr, BY_HAND: tl.constexpr):
    """Store float32 x, rounded to ROUND ("" is float32) and then to the dtype of `target`.

    A `target` of int16 takes the bits of bf16: BY_HAND's way to store subnormal numbers.
    """
    if ROUND == "bfloat16":
        x = to_bf16(x, BY_HAND)
    if ROUND == "float16":
        x = x.to(tl.float16).to(tl.float32)
    if target.dtype.element_ty == tl.int16:
        bits = to_bf16(x, True).to(tl.int32, bitcast=True)
        tl.store(target, (bits >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(target, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def power_of_two_of(exponent):
    """2^(exponent - 127) as float32 of an integer 0..255; 2^-127, which is subnormal, for 0."""
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3(byte):
    """float32 of the bits of e4m3 in an int32: the exponent is moved by 120; below 2^-6 there are 8 steps."""
    low = byte & 127
    normal = ((low << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    size = tl.where(low < 8, low.to(tl.float32) * 0.001953125, normal).to(tl.int32, bitcast=True)
    size = tl.where(low == 127, 0x7FC00000, size)
    return (size | ((byte & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1(code):
    """float32 of a code of 4 bits: (1 + m / 2) 2^(e - 1), and m / 2 if e is 0; negative from 8 on."""
    e, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    size = tl.where(e == 0, half, (1 + half) * power_of_two_of(e + 126))
    return (size.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(pointers, inside, KIND: tl.constexpr):
    """float32 of scales in memory. KIND: "float32", "float16", "bfloat16", "e4m3", "power" (exponent)."""
    loaded = tl.load(pointers, mask=inside, other=0)
    if KIND == "bfloat16":
        return widen(loaded)
    if KIND == "power":
        return power_of_two_of(loaded.to(tl.int32))
    if KIND == "e4m3":
        return e4m3(loaded.to(tl.int32))
    return loaded.to(tl.float32)
