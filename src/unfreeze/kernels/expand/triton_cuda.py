"""Expansion on CUDA: any number of matrices of a stack in one launch.

Each goes into its block of a workspace. M requested matrices, O output rows, a program per row and block of
columns. INT4: a word is loaded once and yields eight neighbouring numbers.
"""

# A launch takes numbers for constexpr parameters, and num_warps, which the kernel's signature doesn't declare
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.expand.bucket import readable
from unfreeze.kernels.loops.triton_options import interpreted, power_of_two
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.int4 import PER_WORD, Int4


@triton.jit
def widen(x):
    """bf16 -> float32 by its bits, including subnormals.

    The interpreter's own conversion gets those wrong.
    """
    bits = x.to(tl.int16, bitcast=True)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x, BY_HAND: tl.constexpr):
    """float32 -> the nearest bf16, ties to even, as float32.

    BY_HAND: in integers, because the interpreter's conversion truncates.
    """
    if BY_HAND:
        bits = x.to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        rounded = (((bits + 0x7FFF + odd) >> 16) << 16).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _expand(
    packed,
    scale,
    experts,
    first,
    out,
    rows,
    words,
    columns,
    groups,
    matrix_stride,
    row_stride,
    GROUP: tl.constexpr,
    CHOSEN: tl.constexpr,
    BY_HAND: tl.constexpr,
    WORDS: tl.constexpr,
):
    """out[m, o, c] = (nibble - 8) * scale[o, c // GROUP].

    Matrix m is experts[m] of the stack (CHOSEN), or first + m.
    """
    job = tl.program_id(0).to(tl.int64)
    m, o = job // rows, job % rows
    expert = first + m
    if CHOSEN:
        expert = tl.load(experts + m).to(tl.int64)
    source = expert * rows + o
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, 8)
    column = word[:, None] * 8 + lane[None, :]
    inside = column < columns
    bits = tl.load(packed + source * words + word, mask=word < words, other=0)
    codes = ((bits[:, None] >> (lane * 4)[None, :]) & 15) - 8
    if GROUP % 8 == 0:  # the eight codes of a word share a scale
        scales = widen(tl.load(scale + source * groups + word * 8 // GROUP, mask=word < words, other=0))[
            :, None
        ]
    else:
        scales = widen(tl.load(scale + source * groups + column // GROUP, mask=inside, other=0))
    values = to_bf16(codes.to(tl.float32) * scales, BY_HAND)
    tl.store(out + m * matrix_stride + o * row_stride + column, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def power_of_two_of(exponent):
    """2^(exponent - 127) as float32 of an integer 0..255; 2^-127, which is subnormal, for 0."""
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _expand_fp8(
    packed,
    scale,
    experts,
    first,
    out,
    rows,
    columns,
    down,
    across,
    block_rows,
    block_columns,
    matrix_stride,
    row_stride,
    SCALE: tl.constexpr,
    NARROW: tl.constexpr,
    CHOSEN: tl.constexpr,
    BY_HAND: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[m, o, c] = e4m3(code) * scale[o // block_rows, c // block_columns] (numba_cpu.py has the formula).

    SCALE: "float32", "bfloat16", or "power": an exponent. NARROW: rounded to bf16.
    """
    job = tl.program_id(0).to(tl.int64)
    m, o = job // rows, job % rows
    expert = first + m
    if CHOSEN:
        expert = tl.load(experts + m).to(tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < columns
    byte = tl.load(packed + (expert * rows + o) * columns + column, mask=inside, other=0).to(tl.int32)
    low = byte & 127
    normal = ((low << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    size = tl.where(low < 8, low.to(tl.float32) * 0.001953125, normal).to(tl.int32, bitcast=True)
    size = tl.where(low == 127, 0x7FC00000, size)
    number = (size | ((byte & 128) << 24)).to(tl.float32, bitcast=True)
    at = scale + (expert * down + o // block_rows) * across + column // block_columns
    scales = tl.load(at, mask=inside, other=0)
    if SCALE == "bfloat16":
        scales = widen(scales)
    if SCALE == "power":
        scales = power_of_two_of(scales.to(tl.int32))
    values = number * scales
    if NARROW:
        values = to_bf16(values, BY_HAND)
    tl.store(out + m * matrix_stride + o * row_stride + column, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expand_mxfp4(
    packed,
    scale,
    experts,
    first,
    out,
    rows,
    columns,
    matrix_stride,
    row_stride,
    CHOSEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[m, o, c] = e2m1(code) * 2^(scale[o, c // 32] - 127): nothing rounds. WIDE columns of a row."""
    job = tl.program_id(0).to(tl.int64)
    m, o = job // rows, job % rows
    expert = first + m
    if CHOSEN:
        expert = tl.load(experts + m).to(tl.int64)
    source = expert * rows + o
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < columns
    byte = tl.load(packed + source * (columns // 2) + column // 2, mask=inside, other=0).to(tl.int32)
    code = (byte >> (column % 2 * 4)) & 15
    # (1 + m / 2) 2^(e - 1), and m / 2 if e is 0
    e, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    size = tl.where(e == 0, half, (1 + half) * power_of_two_of(e + 126))
    sign = tl.where(code < 8, 1.0, -1.0)
    exponent = tl.load(scale + source * (columns // 32) + column // 32, mask=inside, other=0).to(tl.int32)
    values = sign * size * power_of_two_of(exponent)
    tl.store(out + m * matrix_stride + o * row_stride + column, values.to(out.dtype.element_ty), mask=inside)


SCALES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float8_e8m0fnu: "power"}


def fill(packed: Packed, experts: Tensor | int, out: Tensor) -> None:
    """out[m] = weight[experts[m]], or weight[experts + m] if `experts` is a number: one launch.

    Reads only the requested matrices. packed: a `readable` format, [E, O, I]; experts int on the device; out
    [M, O, I] bf16 or float32, last stride 1.
    """
    parts = list(packed.parts.values())
    any_group = isinstance(packed.codec, Int4) and all(part.is_contiguous() for part in parts)
    if not readable(packed) and not (any_group and torch.bfloat16 in (part.dtype for part in parts)):
        raise ValueError(
            f"not a {packed.codec.name} weight this kernel can read: contiguous parts, and scales as in"
            " expand/bucket.py"
        )
    chosen = isinstance(experts, Tensor)
    matrices = experts.numel() if isinstance(experts, Tensor) else min(len(out), packed.shape[0] - experts)
    _, rows, columns = packed.shape
    if (
        out.shape != (matrices, rows, columns)
        or out.stride(-1) != 1
        or out.dtype not in (torch.bfloat16, torch.float32)
    ):
        wanted = f"bfloat16 or float32 {[matrices, rows, columns]}, last stride 1"
        raise ValueError(f"out is {out.dtype} {list(out.shape)} with strides {out.stride()}, wanted {wanted}")
    if not out.numel():
        return
    codec = packed.codec
    codes, scales = (packed.parts[suffix] for suffix in codec.suffixes[:2])
    strides = (out.stride(0), out.stride(1))
    if isinstance(codec, Int4):
        words = -(-columns // PER_WORD)
        block = min(power_of_two(words), 512)
        _expand[(matrices * rows, triton.cdiv(words, block))](
            codes,
            scales,
            experts if chosen else codes,
            0 if chosen else experts,
            out,
            rows,
            words,
            columns,
            scales.shape[-1],
            *strides,
            GROUP=codec.group_size,
            CHOSEN=chosen,
            BY_HAND=interpreted(),
            WORDS=block,
        )
        return
    # consecutive experts need no list: pass any tensor in its place
    which = (experts if chosen else codes.view(torch.uint8), 0 if chosen else experts)
    wide = min(power_of_two(columns), 1024)
    grid = (matrices * rows, triton.cdiv(columns, wide))
    if isinstance(codec, Fp8 | Fp8Scaled):
        if isinstance(codec, Fp8):
            block = codec.block
        else:
            scales = scales.reshape(len(codes), -1, 1)
            block = (1 if scales.shape[1] == rows else rows, columns)
        narrow = out.dtype == torch.bfloat16 or scales.dtype != torch.float32
        power = scales.dtype == torch.float8_e8m0fnu
        _expand_fp8[grid](
            codes.view(torch.uint8),
            scales.view(torch.uint8) if power else scales,
            *which,
            out,
            rows,
            columns,
            *scales.shape[-2:],
            *block,
            *strides,
            SCALE=SCALES[scales.dtype],
            NARROW=narrow,
            CHOSEN=chosen,
            BY_HAND=interpreted(),
            WIDE=wide,
        )
        return
    _expand_mxfp4[grid](
        codes, scales.view(torch.uint8), *which, out, rows, columns, *strides, CHOSEN=chosen, WIDE=wide
    )


class Expand:
    """The candidate: expand() as in kernels.expand, and `fill` for many matrices in one launch."""

    fill = staticmethod(fill)

    def __call__(self, packed: Packed, expert: int | None, out: Tensor) -> Tensor:
        one = packed if expert is None else packed[expert]
        fill(
            Packed(one.codec, {name: part.unsqueeze(0) for name, part in one.parts.items()}),
            0,
            out.unsqueeze(0),
        )
        return out
