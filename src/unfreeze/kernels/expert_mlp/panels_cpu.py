"""A group of INT4 experts on CPUs with AVX512-bf16: forward is one compiled loop, and so is backward.

64 columns of a weight at a time are expanded into a panel, multiplied with all the expert's rows while the
panel is in L2, and overwritten by the next 64. The operations, their order and their roundings are those of
by_gemms.py, which has a torch.mm per product. Differences:
- no expanded matrix exists, and oneDNN has nothing to pack;
- the last product of either direction is added to the float32 sums of its tokens without being rounded or
  stored;
- threads do not wait for Python's lock.
For bf16 with a frozen INT4 base in groups of 32 or a multiple, and widths in multiples of 64.

n rows of a group, r of one expert (a multiple of ROWS, padding included), T, D, I, Q, P as in factors.py.
B1 [Q, 2I] and B2 [P, D] are transposed.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp import numba_kernels, thin_cpu
from unfreeze.kernels.expert_mlp.factors import round_up
from unfreeze.kernels.expert_mlp.loop_cpu import LoopCpu
from unfreeze.kernels.int4_expand.numba_cpu import expandable
from unfreeze.kernels.loops import bf16_cpu
from unfreeze.kernels.loops.bf16_tile import COLUMNS, LINE, ROWS, narrow_tile, prefetch, tile
from unfreeze.kernels.loops.int4_panels import across, along, beside
from unfreeze.kernels.loops.numba_options import array, narrow, serial, widen
from unfreeze.kernels.loops.scratch import scratch
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

log = logging.getLogger(__name__)

_dots, _outer = thin_cpu.dots_loop, thin_cpu.outer_loop
_gather, _swiglu, _swiglu_backward = numba_kernels.gather.alone, numba_kernels.swiglu.alone, numba_kernels.swiglu_backward.alone


@serial
def _store(a, pairs, panel, first, out):
    """out[:, first : first + COLUMNS] = a · panel, rounded once to bf16. a [r, >= 2 pairs]."""
    for row in range(0, a.shape[0], ROWS):
        here, there = a.ctypes.data + row * a.strides[0], out.ctypes.data + row * out.strides[0] + 2 * first
        narrow_tile(here, a.strides[0], panel.ctypes.data, pairs, there, out.strides[0])  # type: ignore[call-arg]


@serial
def _add(a, pairs, panel, sums, first, token, weight, out):
    """out[token[r], first : first + COLUMNS] += weight[r] · (a · panel)[r], in float32; nothing where the token is -1 (padding)."""
    for row in range(0, a.shape[0], ROWS):
        for i in range(ROWS):
            where = out.ctypes.data + max(token[row + i], 0) * out.strides[0] + 4 * first
            for line in range(0, 4 * COLUMNS, LINE):
                prefetch(where + line)  # type: ignore[call-arg]
        tile(a.ctypes.data + row * a.strides[0], a.strides[0], panel.ctypes.data, pairs, sums.ctypes.data, sums.strides[0])  # type: ignore[call-arg]
        for i in range(ROWS):
            if token[row + i] >= 0:
                target, found, w = out[token[row + i], first : first + COLUMNS], sums[i], weight[row + i]
                for j in range(COLUMNS):
                    target[j] += w * found[j]


@serial
def _forward(x, token, weight, experts, begins, up, low, A1, B1, A2, B2, room, gate_up, xA, hA, y):
    """y[token] += weight · expert(x[token]) for a group's rows. Writes gate_up, xA and hA, which backward
    reads.

    x [T, D]   token [n] (-1: padding)   weight [n]   begins: expert g has the rows begins[g] : begins[g + 1]
    up, low: Base.codes     A1 [., Q, D]  B1 [., Q, 2I]  A2 [., P, I]  B2 [., P, D]
    gate_up [n, 2I]         xA [n, Q]     hA [n, P]      y [T, D] float32     room: this thread's buffers
    """
    rows_x, rows_h, panel, sums, dots = room
    D, I, Q, P = x.shape[1], gate_up.shape[1] // 2, xA.shape[1], hA.shape[1]
    for g in range(begins.size - 1):
        e, begin, end = experts[g], begins[g], begins[g + 1]
        r, here = end - begin, slice(begin, end)
        xs, hs = rows_x[:r], rows_h[:r]
        # gate_up = [x | xA] [W1 | B1]ᵀ, 64 columns at a time; xA = x A1ᵀ
        _gather(x, token[here], xs)
        if Q:
            _dots(xs[:, :D], A1[g], dots, xs[:, D:])
            xA[here] = xs[:, D:]
        for first in range(0, 2 * I, COLUMNS):
            across(up[0][e], up[1][e], up[2], first, panel)
            beside(B1[g], first, panel, D // 2)
            _store(xs, (D + Q) // 2, panel, first, gate_up[here])
        # h = silu(gate) · up; y[token] += weight · [h | hA] [W2 | B2]ᵀ, with hA = h A2ᵀ
        _swiglu(gate_up[here], hs)
        if P:
            _dots(hs[:, :I], A2[g], dots, hs[:, I:])
            hA[here] = hs[:, I:]
        for first in range(0, D, COLUMNS):
            across(low[0][e], low[1][e], low[2], first, panel)
            beside(B2[g], first, panel, I // 2)
            _add(hs, (I + P) // 2, panel, sums, first, token[here], weight[here], y)


@serial
def _backward(x, dy, token, weight, ones, experts, begins, up, low, A1, B1, A2, B2, room, gate_up, xA, hA, score, dA1, dB1, dA2, dB2, dx):
    """Gradients of a group: score [n], those of the factors (float32), and dx[token] += … where dx has rows.

    Arguments as in `_forward`; dy [T, D], score [n] the gradient of weight, dA1 … shaped as A1 …, ones [n].
    """
    rows_x, rows_dy, rows_dh, rows_wh, rows_dgu, thin, panel, sums, dots, pairs_Q, pairs_P = room
    D, I, Q, P = x.shape[1], gate_up.shape[1] // 2, xA.shape[1], hA.shape[1]
    for g in range(begins.size - 1):
        e, begin, end = experts[g], begins[g], begins[g + 1]
        r, here = end - begin, slice(begin, end)
        dys, dh, wh, dgu = rows_dy[:r], rows_dh[:r], rows_wh[:r], rows_dgu[:r]
        # dh = dy W2 + (dy B2ᵀ) A2, not yet times the routing weight
        _gather(dy, token[here], dys)
        if P:
            _dots(dys[:, :D], B2[g], dots, dys[:, D:])
        for first in range(0, I, COLUMNS):
            along(low[0][e], low[1][e], low[2], first, panel)
            beside(A2[g], first, panel, D // 2)
            _store(dys, (D + P) // 2, panel, first, dh)
        # wh = w h, dgu = gradient of gate_up (times w), score = <dh, h>
        _swiglu_backward(dh, gate_up[here], weight[here], wh, dgu, score[here])
        # dA2 = (dy B2ᵀ)ᵀ (w h); dB2 = (w hA)ᵀ dy
        if P:
            weighted = thin[:r]
            for i in range(r):
                for p in range(P):
                    weighted[i, p] = narrow(weight[begin + i] * widen(hA[begin + i, p]), hA[0, 0])
            _outer(dys[:, D:], wh, pairs_P[: r // 2], dA2[g])
            _outer(weighted, dys[:, :D], pairs_P[: r // 2], dB2[g])
        # dx[token] += dgu W1 + (dgu B1ᵀ) A1; the routing weight is in dgu already, hence `ones`
        if Q:
            _dots(dgu[:, : 2 * I], B1[g], dots, dgu[:, 2 * I :])
        if dx.shape[0]:
            for first in range(0, D, COLUMNS):
                along(up[0][e], up[1][e], up[2], first, panel)
                beside(A1[g], first, panel, I)
                _add(dgu, (2 * I + Q) // 2, panel, sums, first, token[here], ones, dx)
        # dA1 = (dgu B1ᵀ)ᵀ x; dB1 = xAᵀ dgu
        if Q:
            xs = rows_x[:r]
            _gather(x, token[here], xs)
            _outer(dgu[:, 2 * I :], xs, pairs_Q[: r // 2], dA1[g])
            _outer(xA[here], dgu[:, : 2 * I], pairs_Q[: r // 2], dB1[g])


EXPERTS = 4  # of a group: Python is crossed once for them, and cores are given whole groups


@functools.cache
def available() -> bool:
    """Whether this CPU has the instruction; said once."""
    found = bf16_cpu.panels_pay()
    log.info("INT4 experts in bfloat16: %s", "panels of 64 columns" if found else "a GEMM per expert (this CPU has no AVX512-bf16)")
    return found


def suits(dtype: torch.dtype, gate_up: Tensor | Packed, down: Tensor | Packed) -> bool:
    """Whether `Panels` can do a call."""
    if dtype != torch.bfloat16 or not all(
        isinstance(base, Packed) and isinstance(base.codec, Int4) and base.codec.group_size % 32 == 0 and expandable(base) for base in (gate_up, down)
    ):
        return False
    return not (gate_up.shape[2] % COLUMNS or down.shape[2] % COLUMNS) and available()


class Panels(LoopCpu):
    """The part that `fused` is given on CPU where it `suits`."""

    def padded(self, rows: int, dtype: torch.dtype) -> int:
        return round_up(rows, ROWS) if dtype == torch.bfloat16 else rows  # the loops of `few` take float32 rows as they are

    def groups(self, routing: Any, weight_bytes: int, row_bytes: int) -> Any:
        """EXPERTS at a time: no buffer holds more than one expert's rows."""
        ends = np.cumsum([0, *routing.sizes]).tolist()
        for first in range(0, len(routing.experts), EXPERTS):
            end = min(first + EXPERTS, len(routing.experts))
            yield self.group(routing, slice(first, end), ends[first], ends[end] - ends[first])

    def forward_group(self, call: Any, group: Any, x: Tensor, kept: tuple[Tensor | None, ...], y: Tensor) -> None:
        D, I, n, most = x.shape[1], call.down.columns, group.num_rows, max(group.sizes)
        A1, B1, A2, B2 = _factors(call, group)
        Q, P = A1.shape[1], A2.shape[1]
        gate_up, xA, hA = (
            array(scratch(name, (n, width), x.dtype, x.device) if tensor is None else tensor[group.rows])
            for name, tensor, width in zip(("gate_up", "xA", "hA"), kept, (2 * I, Q, P), strict=True)
        )
        room = (_rows("x", most, D + Q), _rows("h", most, I + P), *_tile_room(max(D + Q, I + P)))
        bases = (call.gate_up.codes, call.down.codes)
        _forward(array(x), array(group.token), array(group.weight), *_where(group), *bases, A1, B1, A2, B2, room, gate_up, xA, hA, array(y))

    def backward_group(
        self, call: Any, group: Any, x: Tensor, dy: Tensor, saved: tuple[Tensor | None, ...], score_n: Tensor, grads: Any, dx: Tensor | None
    ) -> None:  # fmt: skip
        D, I, n, most = x.shape[1], call.down.columns, group.num_rows, max(group.sizes)
        A1, B1, A2, B2 = _factors(call, group)
        Q, P = A1.shape[1], A2.shape[1]
        gate_up, xA, hA = (
            np.empty((n, 0), np.uint16) if tensor is None else array(tensor[group.rows]) for tensor in saved
        )
        room = (
            _rows("x", most, D), _rows("dy", most, D + P), _rows("dh", most, I), _rows("wh", most, I), _rows("dgu", most, 2 * I + Q),
            _rows("thin", most, P), *_tile_room(max(D + P, 2 * I + Q)),
            _words("pairs Q", most // 2, Q), _words("pairs P", most // 2, P),
        )  # fmt: skip
        ones = np.ones(n, np.float32)
        found = [
            np.empty((0, 0, 0), np.float32) if grad is None else array(grad[group.positions])
            for grad in (grads.gate_up_A, grads.gate_up_Bt, grads.down_A, grads.down_Bt)
        ]
        into = np.empty((0, D), np.float32) if dx is None else array(dx)
        bases = (call.gate_up.codes, call.down.codes)
        rows = (array(group.token), array(group.weight), ones)
        _backward(array(x), array(dy), *rows, *_where(group), *bases, A1, B1, A2, B2, room, gate_up, xA, hA, array(score_n[group.rows]), *found, into)


def _where(group: Any) -> tuple[np.ndarray, np.ndarray]:
    """(experts, begins): rows of expert g of the group are begins[g] : begins[g + 1]."""
    return np.asarray(group.experts), np.cumsum([0, *group.sizes])


def _rows(name: str, count: int, width: int) -> np.ndarray:
    """Uninitialised bf16 [count, width] of this thread."""
    return array(scratch(name, (count, width), torch.bfloat16, torch.device("cpu")))


def _words(name: str, count: int, width: int) -> np.ndarray:
    """Uninitialised pairs of bf16 [count, width] of this thread."""
    return scratch(name, (count, width), torch.int32, torch.device("cpu")).view(torch.uint32).numpy()


def _tile_room(inner: int) -> tuple[np.ndarray, ...]:
    """A panel for an inner dimension, the sums of a tile, and the sums of a tile of dots."""
    cpu = torch.device("cpu")
    sums, dots = (scratch(name, shape, torch.float32, cpu) for name, shape in (("tile", (ROWS, COLUMNS)), ("thin dots", (16,))))
    return _words("panel", -(-inner // 2), COLUMNS), array(sums), array(dots)


def _factors(call: Any, group: Any) -> list[np.ndarray]:
    """A1, B1, A2, B2 of the group's experts as bf16 bits; of rank 0 where there is no adapter."""
    found = []
    D, I = call.gate_up.columns, call.down.columns
    for adapter, into, out in ((call.gate_up_adapter, D, 2 * I), (call.down_adapter, I, D)):
        if adapter is None:
            found += [np.empty((len(group.experts), 0, width), np.uint16) for width in (into, out)]
        else:
            found += [array(adapter.A[group.positions]), array(adapter.Bt[group.positions])]
    return found
