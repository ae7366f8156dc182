"""RMSNorm on CUDA: one program per few rows, each row entirely in registers.

Functions as in reference.py. T rows, D width.
"""

# A launch takes numbers for constexpr parameters, and num_warps, which the kernel's signature doesn't declare
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.loops.rows import rows_view
from unfreeze.kernels.loops.triton_options import power_of_two

SPLITS = 256  # partial sums of the weight's gradient: enough programs to fill a GPU, and a fixed order


@triton.jit
def _forward(x, weight, y, r, x_stride, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / width + eps)
    tl.store(r + row, scale, mask=row < rows)
    normed = (values * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)  # rounded, then scaled
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(
        y + row[:, None] * width + column[None, :], (normed * w[None, :]).to(y.dtype.element_ty), mask=inside
    )


@triton.jit
def _backward(
    dy, x, weight, r, dx, dy_stride, x_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    scale = tl.load(r + row, mask=row < rows, other=0.0)[:, None]
    n = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32) * scale
    g = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    g = g * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    shared = tl.sum(g * n, axis=1) / width
    tl.store(
        dx + row[:, None] * width + column[None, :],
        (scale * (g - n * shared[:, None])).to(dx.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _weight_gradient(
    dy, x, r, partial, dy_stride, x_stride, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """partial[split] = Σ dy n over the split's rows, for a block of columns."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split, splits = tl.program_id(1), tl.num_programs(1)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(split * ROWS, rows, splits * ROWS):
        row = begin + tl.arange(0, ROWS).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < width)
        scale = tl.load(r + row, mask=row < rows, other=0.0)[:, None]
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        grads = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        total += tl.sum(grads * values * scale, axis=0)
    tl.store(partial + split * width + column, total, mask=column < width)


def _tile(width: int) -> tuple[int, int, int]:
    """(rows per program, block, warps).

    Some thousand numbers per program, so a program takes several narrow rows (a head).
    """
    block = power_of_two(width)
    rows = max(1, 2048 // block)
    return rows, block, min(16, max(1, rows * block // 512))


def forward(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, width = rows_view(x_TD), x_TD.shape[-1]
    y = torch.empty(x_TD.shape, dtype=x.dtype, device=x.device)
    r = torch.empty((*x_TD.shape[:-1], 1), dtype=torch.float32, device=x.device)
    rows, block, warps = _tile(width)
    if x.numel():
        _forward[(triton.cdiv(len(x), rows),)](
            x, weight_D, y, r, x.stride(0), len(x), width, eps, ROWS=rows, BLOCK=block, num_warps=warps
        )
    return y, r


def backward(dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, r_T1: Tensor) -> Tensor:
    dy, x, width = rows_view(dy_TD), rows_view(x_TD), x_TD.shape[-1]
    dx = torch.empty(x_TD.shape, dtype=x.dtype, device=x.device)
    rows, block, warps = _tile(width)
    if x.numel():
        _backward[(triton.cdiv(len(x), rows),)](
            dy,
            x,
            weight_D,
            r_T1,
            dx,
            dy.stride(0),
            x.stride(0),
            len(x),
            width,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return dx


def weight_gradient(dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, r_T1: Tensor) -> Tensor:
    dy, x, width = rows_view(dy_TD), rows_view(x_TD), x_TD.shape[-1]
    if not x.numel():
        return torch.zeros_like(weight_D)
    block, rows = min(power_of_two(width), 128), 16
    splits = min(SPLITS, triton.cdiv(len(x), rows))
    partial = torch.empty((splits, width), dtype=torch.float32, device=x.device)
    _weight_gradient[(triton.cdiv(width, block), splits)](
        dy, x, r_T1, partial, dy.stride(0), x.stride(0), len(x), width, ROWS=rows, BLOCK=block
    )
    return partial.sum(0).to(weight_D.dtype)
