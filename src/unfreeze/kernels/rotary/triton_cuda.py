"""The rotation on CUDA: one program per token and block of heads.

rotate() as in reference.py; x and y [T, H, d] with last stride 1.
"""

# A launch takes numbers for constexpr parameters, and num_warps, which the kernel's signature doesn't declare
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.loops.triton_options import power_of_two


@triton.jit
def _rotate(
    x,
    y,
    cos,
    sin,
    x_token,
    x_head,
    y_token,
    y_head,
    cos_token,
    sin_token,
    heads,
    begin,
    pairs,
    sign,
    READ_STEP: tl.constexpr,
    WRITE_STEP: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """STEP 2: pair i is at 2i and 2i + 1 (adjacent); STEP 1: at i and pairs + i (halves)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    source = x + token * x_token + head[:, None] * x_head
    target = y + token * y_token + head[:, None] * y_head
    if KEPT > 0:
        column = tl.arange(0, KEPT)
        inside = (head[:, None] < heads) & (column[None, :] < begin)
        tl.store(
            target + column[None, :], tl.load(source + column[None, :], mask=inside, other=0.0), mask=inside
        )
    pair = tl.arange(0, PAIRS)
    inside = (head[:, None] < heads) & (pair[None, :] < pairs)
    c = tl.load(cos + token * cos_token + pair, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * sin_token + pair, mask=pair < pairs, other=0.0).to(tl.float32)[None, :] * sign
    read_b, write_b = pairs, pairs
    if READ_STEP == 2:
        read_b = 1
    if WRITE_STEP == 2:
        write_b = 1
    read, write = begin + pair[None, :] * READ_STEP, begin + pair[None, :] * WRITE_STEP
    a = tl.load(source + read, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + read + read_b, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + write, (a * c - b * s).to(y.dtype.element_ty), mask=inside)
    tl.store(target + write + write_b, (b * c + a * s).to(y.dtype.element_ty), mask=inside)


def rotate(
    x_THd: Tensor,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    sign: float,
    read_adjacent: bool,
    write_adjacent: bool,
    y_THd: Tensor,
) -> None:
    tokens, heads, width = x_THd.shape
    pairs = cos_Tr.shape[-1]
    if not x_THd.numel():
        return
    begin = width - 2 * pairs
    # some thousand elements per program
    block = min(power_of_two(heads), max(1, 2048 // power_of_two(max(begin, pairs))))
    _rotate[(tokens, triton.cdiv(heads, block))](
        x_THd,
        y_THd,
        cos_Tr,
        sin_Tr,
        x_THd.stride(0),
        x_THd.stride(1),
        y_THd.stride(0),
        y_THd.stride(1),
        cos_Tr.stride(0),
        sin_Tr.stride(0),
        heads,
        begin,
        pairs,
        sign,
        READ_STEP=1 + read_adjacent,
        WRITE_STEP=1 + write_adjacent,
        HEADS=block,
        PAIRS=power_of_two(pairs),
        KEPT=power_of_two(begin) if begin else 0,
    )
