"""SwiGLU on CUDA: one program per row loops over its columns. Functions as in reference.py.

n rows, I columns. Each pointer comes with its row stride, so that halves of a stacked matrix and blocks of a
wider buffer need no copy.
"""

# A launch takes numbers for constexpr parameters, and num_warps, which the kernel's signature doesn't declare
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.loops.triton_options import power_of_two


@triton.jit
def _forward(gate, up, h, gate_stride, up_stride, h_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + row * h_stride + column, (g * tl.sigmoid(g) * u).to(h.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dh,
    gate,
    up,
    weight,
    weighted,
    dgate,
    dup,
    score,
    dh_stride,
    gate_stride,
    up_stride,
    weighted_stride,
    dgate_stride,
    dup_stride,
    width,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    w = 1.0
    if WEIGHTED:
        w = tl.load(weight + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        d = tl.load(dh + row * dh_stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(g)
        silu = g * sigmoid
        if WEIGHTED:
            h = silu * u
            total += d * h
            tl.store(
                weighted + row * weighted_stride + column, (w * h).to(weighted.dtype.element_ty), mask=inside
            )
            d = w * d
        slope = sigmoid + silu * (1.0 - sigmoid)
        tl.store(dgate + row * dgate_stride + column, (d * u * slope).to(dgate.dtype.element_ty), mask=inside)
        tl.store(dup + row * dup_stride + column, (d * silu).to(dup.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(score + row, tl.sum(total, axis=0))


def forward(gate: Tensor, up: Tensor, h: Tensor) -> None:
    rows, width = gate.shape
    if gate.numel():
        block = min(power_of_two(width), 2048)
        _forward[(rows, triton.cdiv(width, block))](
            gate, up, h, gate.stride(0), up.stride(0), h.stride(0), width, BLOCK=block
        )


def backward(dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    _launch(dh, gate, up, None, dh, dgate, dup, None)


def backward_weighted(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    weight_n: Tensor,
    weighted: Tensor,
    dgate: Tensor,
    dup: Tensor,
    score_n: Tensor,
) -> None:
    """weight_n and score_n float32, contiguous."""
    _launch(dh, gate, up, weight_n, weighted, dgate, dup, score_n)


def _launch(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor | None,
    weighted: Tensor,
    dgate: Tensor,
    dup: Tensor,
    score: Tensor | None,
) -> None:
    rows, width = gate.shape
    if not rows:
        return
    tensors = (dh, gate, up, weighted, dgate, dup)
    _backward[(rows,)](
        dh,
        gate,
        up,
        dh if weight is None else weight,
        weighted,
        dgate,
        dup,
        dh if score is None else score,
        *(tensor.stride(0) for tensor in tensors),
        width,
        WEIGHTED=weight is not None,
        BLOCK=min(power_of_two(width), 1024),
    )
