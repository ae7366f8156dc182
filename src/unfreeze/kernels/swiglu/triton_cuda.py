"""Gated activations on CUDA: one program per row loops over its columns. Functions as in reference.py.

n rows, I columns. Each pointer comes with its row stride, so that halves of a stacked matrix and blocks of a
wider buffer need no copy. Gate and up that alternate (PAIRS) are read and written as pairs, 2 I numbers side
by side. Every activation is g · sigmoid(z) times up, of gate and up as `_inputs` returns them:

    silu     z = g
    gelu     z = 2 √(2/π) (g + 0.044715 g³)        (1 + tanh(z / 2)) / 2 = sigmoid(z)
    relu2    max(g, 0)² alone: there is no up
    clamped  z = alpha g, g = min(gate, limit), times 1 + (up within ±limit)

NaN stays NaN: comparisons choose, no minimum does.
"""

# A launch takes numbers for constexpr parameters, and num_warps, which the kernel's signature doesn't declare
# (a kernel's functions return values, which pyright takes for none)
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.loops.triton_options import power_of_two
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation, ClampedSwiGLU


@triton.jit
def _inputs(gate, up, begin, width, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """gate and up of BLOCK columns in float32; PAIRS: both from `gate`."""
    if PAIRS:
        pair = 2 * begin + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate + pair, mask=pair < 2 * width, other=0.0).to(tl.float32)
        g, u = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        column = begin + tl.arange(0, BLOCK)
        g = tl.load(gate + column, mask=column < width, other=0.0).to(tl.float32)
        u = tl.load(up + column, mask=column < width, other=0.0).to(tl.float32)
    return g, u


@triton.jit
def _gated(g, u, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ADDED: tl.constexpr):
    """(a, its derivative, the factor, the derivative of the factor): h = a · factor, a = g sigmoid(z)."""
    factor, of_up = u, 1.0
    of_gate, slope = 1.0, 1.0  # dg/dgate, dz/dg
    z = g
    if KIND == "clamped":
        of_gate = tl.where(g > LIMIT, 0.0, 1.0)
        of_up = tl.where(u > LIMIT, 0.0, tl.where(u < -LIMIT, 0.0, 1.0))
        factor = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u)) + ADDED
        g = tl.where(g > LIMIT, LIMIT, g)
        z, slope = ALPHA * g, ALPHA
    if KIND == "gelu":
        z = 1.5957691216057308 * (g + 0.044715 * g * g * g)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    if KIND == "relu2":
        positive = tl.where(g > 0.0, g, 0.0)
        return positive * positive, 2.0 * positive, positive * 0.0 + 1.0, 0.0
    sigmoid = tl.sigmoid(z)
    a = g * sigmoid
    return a, (sigmoid + a * (1.0 - sigmoid) * slope) * of_gate, factor, of_up


@triton.jit
def _forward(
    gate,
    up,
    h,
    gate_stride,
    up_stride,
    h_stride,
    width,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    g, u = _inputs(gate + row * gate_stride, up + row * up_stride, begin, width, PAIRS, BLOCK)
    a, _, factor, _ = _gated(g, u, KIND, ALPHA, LIMIT, ADDED)
    column = begin + tl.arange(0, BLOCK)
    tl.store(h + row * h_stride + column, (a * factor).to(h.dtype.element_ty), mask=column < width)


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
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
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
        g, u = _inputs(gate + row * gate_stride, up + row * up_stride, begin, width, PAIRS, BLOCK)
        a, slope, factor, of_up = _gated(g, u, KIND, ALPHA, LIMIT, ADDED)
        if WEIGHTED:
            h = a * factor
            total += d * h
            tl.store(
                weighted + row * weighted_stride + column, (w * h).to(weighted.dtype.element_ty), mask=inside
            )
            d = w * d
        to_gate, to_up = d * factor * slope, d * a * of_up
        if PAIRS_OUT:
            pair = 2 * begin + tl.arange(0, 2 * BLOCK)
            both = tl.interleave(to_gate, to_up).to(dgate.dtype.element_ty)
            tl.store(dgate + row * dgate_stride + pair, both, mask=pair < 2 * width)
        else:
            tl.store(dgate + row * dgate_stride + column, to_gate.to(dgate.dtype.element_ty), mask=inside)
            if KIND != "relu2":
                tl.store(dup + row * dup_stride + column, to_up.to(dup.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(score + row, tl.sum(total, axis=0))


def forward(gate: Tensor, up: Tensor, h: Tensor, activation: Activation = SWIGLU) -> None:
    rows, width = gate.shape
    if gate.numel():
        block = min(power_of_two(width), 2048)
        _forward[(rows, triton.cdiv(width, block))](
            gate,
            up if up.shape[1] else gate,
            h,
            gate.stride(0),
            up.stride(0),
            h.stride(0),
            width,
            **_constants(activation),
            PAIRS=_pairs(gate, up),
            BLOCK=block,
        )


def backward(
    dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, activation: Activation = SWIGLU
) -> None:
    _launch(dh, gate, up, None, dh, dgate, dup, None, activation)


def backward_weighted(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    weight_n: Tensor,
    weighted: Tensor,
    dgate: Tensor,
    dup: Tensor,
    score_n: Tensor,
    activation: Activation = SWIGLU,
) -> None:
    """weight_n and score_n float32, contiguous."""
    _launch(dh, gate, up, weight_n, weighted, dgate, dup, score_n, activation)


def _launch(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor | None,
    weighted: Tensor,
    dgate: Tensor,
    dup: Tensor,
    score: Tensor | None,
    activation: Activation,
) -> None:
    rows, width = gate.shape
    if not rows:
        return
    tensors = (dh, gate, up, weighted, dgate, dup)
    _backward[(rows,)](
        dh,
        gate,
        up if up.shape[1] else gate,
        dh if weight is None else weight,
        weighted,
        dgate,
        dup if up.shape[1] else dgate,
        dh if score is None else score,
        *(tensor.stride(0) for tensor in tensors),
        width,
        WEIGHTED=weight is not None,
        **_constants(activation),
        PAIRS=_pairs(gate, up),
        PAIRS_OUT=_pairs(dgate, dup),
        BLOCK=min(power_of_two(width), 1024),
    )


def _constants(activation: Activation) -> dict[str, Any]:
    """The activation as a kernel's constants."""
    alpha, limit, added = 0.0, 0.0, 0.0
    if isinstance(activation, ClampedSwiGLU):
        alpha, limit, added = activation.alpha, activation.limit, activation.added
    return {"KIND": activation.kind, "ALPHA": alpha, "LIMIT": limit, "ADDED": added}


def _pairs(gate: Tensor, up: Tensor) -> bool:
    """True if gate and up alternate in memory, gate first. Raises ValueError for any other stride than 1."""
    steps = {tensor.stride(1) for tensor in (gate, up) if tensor.shape[1] > 1}
    if steps <= {1}:
        # one column each: a row of a pair is two numbers, which both layouts describe
        return False
    if steps == {2} and up.storage_offset() == gate.storage_offset() + 1 and gate.stride(0) == up.stride(0):
        return True
    raise ValueError(f"gate and up have columns {sorted(steps)} apart, and do not alternate")
