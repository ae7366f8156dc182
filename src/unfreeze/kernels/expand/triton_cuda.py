"""INT4 expansion on CUDA: any number of matrices of a stack in one launch.

Each goes into its block of a workspace. M matrices asked for, O output rows, a program per row and block of
words: a word is loaded once and gives eight neighbouring numbers.
"""

# A launch takes numbers for constexpr parameters, and num_warps, which the kernel's own signature doesn't say
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.loops.triton_options import interpreted, power_of_two
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import PER_WORD, Int4


@triton.jit
def widen(x):
    """bf16 -> float32 by its bits, subnormal ones too.

    The interpreter's own conversion gets those wrong.
    """
    bits = x.to(tl.int16, bitcast=True)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x, BY_HAND: tl.constexpr):
    """float32 -> the nearest bf16, ties to even, as float32.

    BY_HAND: in integers, as the interpreter's own conversion cuts off.
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
    if GROUP % 8 == 0:  # the eight of a word have one scale
        scales = widen(tl.load(scale + source * groups + word * 8 // GROUP, mask=word < words, other=0))[
            :, None
        ]
    else:
        scales = widen(tl.load(scale + source * groups + column // GROUP, mask=inside, other=0))
    values = to_bf16(codes.to(tl.float32) * scales, BY_HAND)
    tl.store(out + m * matrix_stride + o * row_stride + column, values.to(out.dtype.element_ty), mask=inside)


def fill(packed: Packed, experts: Tensor | int, out: Tensor) -> None:
    """out[m] = weight[experts[m]], or weight[experts + m] where that is a number: one launch.

    Nothing but what is asked for is read.
    packed int4 [E, O, I] in one piece with bf16 scales; experts int on the device; out [M, O, I] bf16 or
    float32, last stride 1.
    """
    codec = packed.codec
    codes, scales = packed.parts["weight_packed"], packed.parts["weight_scale"]
    chosen = isinstance(experts, Tensor)
    matrices = (
        experts.numel() if isinstance(experts, Tensor) else min(out.shape[0], packed.shape[0] - experts)
    )
    _, rows, columns = packed.shape
    if (
        not isinstance(codec, Int4)
        or not (codes.is_contiguous() and scales.is_contiguous())
        or scales.dtype != torch.bfloat16
    ):
        raise ValueError("not an int4 weight this kernel can read: contiguous parts, bf16 scales")
    if (
        out.shape != (matrices, rows, columns)
        or out.stride(-1) != 1
        or out.dtype not in (torch.bfloat16, torch.float32)
    ):
        wanted = f"bfloat16 or float32 {[matrices, rows, columns]}, last stride 1"
        raise ValueError(f"out is {out.dtype} {list(out.shape)} with strides {out.stride()}, wanted {wanted}")
    if not out.numel():
        return
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
        out.stride(0),
        out.stride(1),
        GROUP=codec.group_size,
        CHOSEN=chosen,
        BY_HAND=interpreted(),
        WORDS=block,
    )


class Expand:
    """The candidate: expand() as kernels.expand has it, and `fill` for many matrices in one launch."""

    fill = staticmethod(fill)

    def __call__(self, packed: Packed, expert: int | None, out: Tensor) -> Tensor:
        one = packed if expert is None else packed[expert]
        fill(
            Packed(one.codec, {name: part.unsqueeze(0) for name, part in one.parts.items()}),
            0,
            out.unsqueeze(0),
        )
        return out
