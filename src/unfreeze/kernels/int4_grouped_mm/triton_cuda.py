"""Rows times INT4 experts with the codes expanded inside the GEMM's tile.

The weights are read from memory at 0.5625 byte each, once per block of rows. This is faster for few rows per
expert; beyond some hundred rows, expanding once and a plain grouped GEMM win (records decide).

n rows sorted by expert, E experts, N outputs, M inputs.
"""

# A launch takes numbers for constexpr parameters, and num_warps, which the kernel's signature doesn't declare
# (to pyright a kernel's function returns nothing)
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.choice.op import Config, Implementation
from unfreeze.kernels.expand.triton_numbers import to_bf16, widen
from unfreeze.kernels.loops.triton_options import interpreted, power_of_two
from unfreeze.kernels.loops.triton_tiles import rows_of_tile
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4


@triton.jit
def _multiply(
    x,
    packed,
    scale,
    offsets,
    y,
    x_stride,
    y_stride,
    num_experts,
    N,
    M,
    words,
    groups,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """A program per tile of ROWS rows of one expert and OUT outputs."""
    e, first, end = rows_of_tile(tl.program_id(1), offsets, num_experts, EXPERTS, ROWS)
    if e < 0:
        return
    row = first + tl.arange(0, ROWS)
    out = tl.program_id(0) * OUT + tl.arange(0, OUT)
    source = (e * N + out).to(tl.int64)
    lane, column = tl.arange(0, 8), tl.arange(0, IN)
    total = tl.zeros((ROWS, OUT), tl.float32)
    for begin in range(0, M, IN):
        inside = (row[:, None] < end) & ((begin + column)[None, :] < M)
        a = tl.load(x + row[:, None] * x_stride + (begin + column)[None, :], mask=inside, other=0.0)
        word = begin // 8 + tl.arange(0, IN // 8)
        known = (out[:, None] < N) & (word[None, :] < words)
        bits = tl.load(packed + source[:, None] * words + word[None, :], mask=known, other=0)
        codes = ((bits[:, :, None] >> (lane * 4)[None, None, :]) & 15) - 8
        group = begin // GROUP + tl.arange(0, IN // GROUP)
        known = (out[:, None] < N) & (group[None, :] < groups)
        scales = widen(tl.load(scale + source[:, None] * groups + group[None, :], mask=known, other=0))
        values = tl.reshape(codes.to(tl.float32), (OUT, IN // GROUP, GROUP)) * scales[:, :, None]
        w = tl.reshape(to_bf16(values, BY_HAND), (OUT, IN)).to(a.dtype)
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    inside = (row[:, None] < end) & (out[None, :] < N)
    tl.store(y + row[:, None] * y_stride + out[None, :], total.to(y.dtype.element_ty), mask=inside)


class Int4GroupedMm:
    """The candidate, with the launch parameters of `config` in the place of its own: ROWS, OUT, num_warps."""

    def __init__(self, config: Config | None = None):
        self.config = dict(config or {})

    def configured(self, config: Config) -> Implementation:
        return Int4GroupedMm(config)

    def __call__(self, x_nM: Tensor, packed: Packed, offsets_E: Tensor) -> Tensor:
        return int4_grouped_mm(x_nM, packed, offsets_E, self.config)


def int4_grouped_mm(x_nM: Tensor, packed: Packed, offsets_E: Tensor, config: Config | None = None) -> Tensor:
    codec, (num_experts, N, M) = packed.codec, packed.shape
    assert isinstance(codec, Int4)
    codes, scales = packed.parts["weight_packed"], packed.parts["weight_scale"]
    n = x_nM.shape[0]
    y_nN = torch.empty((n, N), dtype=x_nM.dtype, device=x_nM.device)
    if not y_nN.numel():
        return y_nN
    # A tensor core's tile has at least 16 rows. float32 runs without tensor cores; with more rows ptxas
    # spills.
    narrow = x_nM.dtype == torch.float32
    most_rows = 32 if narrow else 128 if codec.group_size < 128 else 64
    rows = min(most_rows, max(16, power_of_two(-(-n // num_experts))))
    options = {
        "ROWS": rows,
        "OUT": 16 if narrow else 64,
        "num_warps": 8 if rows == 128 or codec.group_size == 128 else 4,
    } | dict(config or {})
    rows, outs = options["ROWS"], options["OUT"]
    most = n // rows + min(num_experts, n)  # upper bound of tiles for any routing: no host sync
    _multiply[(triton.cdiv(N, outs), most)](
        x_nM,
        codes,
        scales,
        offsets_E,
        y_nN,
        x_nM.stride(0),
        y_nN.stride(0),
        num_experts,
        N,
        M,
        codes.shape[-1],
        scales.shape[-1],
        EXPERTS=power_of_two(num_experts),
        IN=max(64, codec.group_size),
        GROUP=codec.group_size,
        BY_HAND=interpreted(),
        **options,
    )
    return y_nN
