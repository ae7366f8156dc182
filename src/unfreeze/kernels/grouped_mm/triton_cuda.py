"""Grouped matrix products in one launch, with tiles found on the device: no wait of the host.

n rows sorted by expert, E experts, N outputs, M inputs. Sums are float32.
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
from unfreeze.kernels.loops.triton_options import power_of_two
from unfreeze.kernels.loops.triton_tiles import rows_of_tile


@triton.jit
def _rows(
    a,
    b,
    offsets,
    y,
    a_down,
    a_across,
    b_expert,
    b_down,
    b_across,
    y_down,
    num_experts,
    N,
    M,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    EVEN: tl.constexpr,
):
    """y[r] = a[r] @ b[expert of r]: a [n, M], b [E, M, N]. A tile of ROWS rows of one expert and OUT outputs.

    EVEN: M is a multiple of IN.
    """
    e, first, end = rows_of_tile(tl.program_id(1), offsets, num_experts, EXPERTS, ROWS)
    if e < 0:
        return
    row, out, inner = first + tl.arange(0, ROWS), tl.program_id(0) * OUT + tl.arange(0, OUT), tl.arange(0, IN)
    mine, wanted = row < end, out < N
    left = a + row[:, None] * a_down + inner[None, :] * a_across
    right = b + e * b_expert + inner[:, None] * b_down + out[None, :].to(tl.int64) * b_across
    total = tl.zeros((ROWS, OUT), tl.float32)
    for begin in range(0, M, IN):
        inside_left, inside_right = mine[:, None], wanted[None, :]
        if not EVEN:
            inside_left &= (begin + inner)[None, :] < M
            inside_right &= (begin + inner)[:, None] < M
        x = tl.load(left, mask=inside_left, other=0.0)
        w = tl.load(right, mask=inside_right, other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
        left += IN * a_across
        right += IN * b_down
    target = y + row[:, None] * y_down + out[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=mine[:, None] & wanted[None, :])


@triton.jit
def _outer(
    a,
    b,
    offsets,
    y,
    a_down,
    a_across,
    b_down,
    b_across,
    y_expert,
    y_down,
    M,
    N,
    OUT: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """y[e] = a[:, rows of e] @ b[rows of e], 0 if e has none: a [M, n], b [n, N], y [E, M, N]."""
    e = tl.program_id(1).to(tl.int64)
    first = tl.load(offsets + e - 1, mask=e > 0, other=0).to(tl.int64)
    end = tl.load(offsets + e).to(tl.int64)
    tiles = tl.cdiv(N, ACROSS)
    down = (tl.program_id(0) // tiles) * OUT + tl.arange(0, OUT)
    across = (tl.program_id(0) % tiles) * ACROSS + tl.arange(0, ACROSS)
    total = tl.zeros((OUT, ACROSS), tl.float32)
    for begin in range(first, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        mine = row < end
        left = a + down[:, None].to(tl.int64) * a_down + row[None, :] * a_across
        right = b + row[:, None] * b_down + across[None, :] * b_across
        x = tl.load(left, mask=(down < M)[:, None] & mine[None, :], other=0.0)
        w = tl.load(right, mask=mine[:, None] & (across < N)[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    target = y + e * y_expert + down[:, None].to(tl.int64) * y_down + across[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=(down < M)[:, None] & (across < N)[None, :])


class GroupedMm:
    """The candidate, with the launch parameters of `config` in the place of its own.

    ROWS: of a tile; OUT: outputs of a tile; IN: inputs at a time; num_warps, num_stages.
    """

    def __init__(self, config: Config | None = None):
        self.config = dict(config or {})

    def configured(self, config: Config) -> Implementation:
        return GroupedMm(config)

    def __call__(self, a: Tensor, b: Tensor, offsets_E: Tensor, out: Tensor | None = None) -> Tensor:
        many, narrow = len(offsets_E), a.dtype == torch.float32
        outer = b.dim() == 2
        shape = (many, a.shape[0], b.shape[1]) if outer else (a.shape[0], b.shape[2])
        y = torch.empty(shape, dtype=a.dtype, device=a.device) if out is None else out
        if y.shape != shape or y.stride(-1) != 1:
            raise ValueError(f"out is {list(y.shape)} with strides {y.stride()}, wanted {list(shape)}")
        if not y.numel():
            return y
        return self._outer(a, b, offsets_E, y, narrow) if outer else self._rows(a, b, offsets_E, y, narrow)

    def _rows(self, a: Tensor, b: Tensor, offsets_E: Tensor, y: Tensor, narrow: bool) -> Tensor:
        (n, M), (many, _, N) = a.shape, b.shape
        # A tensor core's tile has at least 16 rows. float32 runs without tensor cores: larger tiles spill.
        rows = min(32 if narrow else 128, max(16, power_of_two(-(-n // many))))
        options = {
            "ROWS": rows,
            "OUT": max(16, min(64 if narrow else 128, power_of_two(N))),
            "IN": max(16, min(32 if narrow else 64, power_of_two(M))),
            "num_warps": 8 if rows == 128 else 4,
            "num_stages": 3,
        } | self.config
        rows, outs = options["ROWS"], options["OUT"]
        most = n // rows + min(many, n)  # upper bound of tiles for any routing: no host sync
        _rows[(triton.cdiv(N, outs), most)](
            a,
            b,
            offsets_E,
            y,
            *a.stride(),
            *b.stride(),
            y.stride(0),
            many,
            N,
            M,
            EXPERTS=power_of_two(many),
            EVEN=M % options["IN"] == 0,
            **options,
        )
        return y

    def _outer(self, a: Tensor, b: Tensor, offsets_E: Tensor, y: Tensor, narrow: bool) -> Tensor:
        (M, n), N = a.shape, b.shape[1]
        options = {
            "ROWS": max(16, min(32 if narrow else 64, power_of_two(-(-n // len(offsets_E))))),
            "OUT": max(16, min(32 if narrow else 128, power_of_two(M))),
            "ACROSS": max(16, min(32 if narrow else 128, power_of_two(N))),
            "num_warps": 4 if narrow or N <= 64 else 8,
            "num_stages": 3,
        } | self.config
        tiles = triton.cdiv(M, options["OUT"]) * triton.cdiv(N, options["ACROSS"])
        _outer[(tiles, len(offsets_E))](
            a, b, offsets_E, y, *a.stride(), *b.stride(), *y.stride()[:2], M, N, **options
        )
        return y
