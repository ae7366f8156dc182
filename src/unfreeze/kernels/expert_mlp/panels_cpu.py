"""A group of experts on a CPU, multiplied straight from their codes.

Forward is one compiled loop, and so is backward. 64 columns of a weight at a time are expanded into a panel,
multiplied with all the expert's rows while the panel is in L2, and overwritten by the next 64. The
operations, their order and their roundings are those of by_gemms.py, which has a torch.mm per product.
Differences:

- no expanded matrix exists, and oneDNN has nothing to pack;
- the last product of either direction is added to the float32 sums of its tokens without being rounded or
  stored;
- threads do not wait for the GIL.

It takes a frozen base in INT4, MXFP4 or FP8 whose scales cover 32 neighbouring weights or more (pack.py),
with widths in multiples of 64: in bf16 on CPUs with AVX512-bf16, in float32 on any. In float32 it also takes
a dense base, in float32 or bf16. products.py has the differences between the two dtypes.

n rows of a group, r of one expert (a multiple of ROWS, including padding), T, D, I, Q, P as in factors.py. B1
[Q, 2I] and B2 [P, D] are transposed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.expand.codes import expandable
from unfreeze.kernels.expert_mlp import numba_kernels
from unfreeze.kernels.expert_mlp.backend import Call, ExpertGradients, ExpertGroup, HostRouting, SavedRows
from unfreeze.kernels.expert_mlp.factors import Adapter, round_up
from unfreeze.kernels.expert_mlp.loop_cpu import HostGroup, LoopCpu, group_sizes
from unfreeze.kernels.expert_mlp.pack import append, fits, pack_columns, pack_rows
from unfreeze.kernels.expert_mlp.products import ROWS, add, dots, outer, store
from unfreeze.kernels.loops import bf16_cpu
from unfreeze.kernels.loops.bf16_tile import COLUMNS
from unfreeze.kernels.loops.float_tile import BLOCK, WIDTH
from unfreeze.kernels.loops.numba_options import array, inner, narrow, serial, widen
from unfreeze.kernels.loops.scratch import scratch
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation
from unfreeze.quant.codec import Packed

log = logging.getLogger(__name__)

GROUP_EXPERTS = 4  # experts per group: Python calls a loop once for all of them; a core takes whole groups

_gather, _swiglu, _swiglu_backward = (
    numba_kernels.gather.loop,
    numba_kernels.swiglu.loop,
    numba_kernels.swiglu_backward.loop,
)


class _Rows(NamedTuple):
    """The rows of a group: its expert g is experts[g] of all E and has the rows begins[g] : begins[g + 1]."""

    token: np.ndarray  # int32 [n], -1 for padding
    weight: np.ndarray  # float32 [n]
    experts: np.ndarray  # int64 [G]
    begins: np.ndarray  # int64 [G + 1]


class _Factors(NamedTuple):
    """The group's adapters as bf16 bits, or their gradients in float32.

    A missing adapter has rank 0, and its gradients are empty. A1 and B1 adapt gate_up, A2 and B2 down; both B
    are transposed.
    """

    A1: np.ndarray  # [G, Q, D]
    B1: np.ndarray  # [G, Q, 2I]
    A2: np.ndarray  # [G, P, I]
    B2: np.ndarray  # [G, P, D]


class _Saved(NamedTuple):
    """backend.SavedRows of the group's rows as bf16 bits; 0 columns wide if there is no adapter."""

    gate_up: np.ndarray  # [n, 2I]
    xA: np.ndarray  # [n, Q]
    hA: np.ndarray  # [n, P]


class _Forward(NamedTuple):
    """Buffers of one thread: for the rows of the group's largest expert, and for a tile."""

    x: np.ndarray  # [r, D + Q]: x | xA
    h: np.ndarray  # [r, I + P]: h | hA
    panel: np.ndarray  # uint32 [pairs of the inner dimension, COLUMNS], or strips of float32
    sums: np.ndarray  # float32: of a tile, or of BLOCK rows
    dots: np.ndarray  # float32: of a tile of thin_cpu, or a strip of a thin factor


class _Backward(NamedTuple):
    """The same for backward."""

    x: np.ndarray  # [r, D]
    dy: np.ndarray  # [r, D + P]: dy | dy B2
    dh: np.ndarray  # [r, I]
    wh: np.ndarray  # [r, I]
    dgu: np.ndarray  # [r, 2I + Q]: dgu | dgu B1
    whA: np.ndarray  # [r, P]
    panel: np.ndarray
    sums: np.ndarray
    dots: np.ndarray
    thin_Q: np.ndarray  # uint32 [r / 2, Q]: rows two by two, for thin_cpu; or float32 [Q, r]
    thin_P: np.ndarray  # uint32 [r / 2, P], or float32 [P, r]


@inner
def _copy(source, target):
    """target[:] = source, of one shape.

    numba's own assignment is slow to compile: it contains the error message for unequal shapes.
    """
    for row in range(source.shape[0]):
        for column in range(source.shape[1]):
            target[row, column] = source[row, column]


@serial
def _forward(x, rows, gate_up, down, factors, saved, y, buffers):
    """y[token] += w · expert(x[token]) for a group's rows; writes `saved`.

    x [T, D] bf16 bits, y [T, D] float32; gate_up and down are the codes of all experts (expand/codes.py).
    """
    D, I = x.shape[1], saved.gate_up.shape[1] // 2
    Q, P = saved.xA.shape[1], saved.hA.shape[1]
    panel = buffers.panel
    for g in range(rows.experts.size):
        e, begin, end = rows.experts[g], rows.begins[g], rows.begins[g + 1]
        r, here = end - begin, slice(begin, end)
        xs, hs = buffers.x[:r], buffers.h[:r]

        # xA = x A1ᵀ beside the expert's rows of x: [x | xA]
        _gather(0, r, x, rows.token[here], xs)
        if Q:
            dots(xs[:, :D], factors.A1[g], buffers.dots, buffers.sums, xs[:, D:])
            _copy(xs[:, D:], saved.xA[here])

        # gate_up = [x | xA] [W1 | B1]ᵀ, COLUMNS at a time: D / 2 pairs of W1, then Q / 2 of B1
        for first in range(0, 2 * I, COLUMNS):
            pack_rows(gate_up, e, first, panel)
            append(factors.B1[g], first, panel, D)
            store(xs, D + Q, panel, first, saved.gate_up[here])

        # h = silu(gate) · up, and hA = h A2ᵀ beside it: [h | hA]
        _swiglu(0, r, saved.gate_up[here], hs)
        if P:
            dots(hs[:, :I], factors.A2[g], buffers.dots, buffers.sums, hs[:, I:])
            _copy(hs[:, I:], saved.hA[here])

        # y[token] += w · [h | hA] [W2 | B2]ᵀ
        for first in range(0, D, COLUMNS):
            pack_rows(down, e, first, panel)
            append(factors.B2[g], first, panel, I)
            add(hs, I + P, panel, buffers.sums, first, rows.token[here], rows.weight[here], y)


@serial
def _backward(x, dy, rows, ones, gate_up, down, factors, saved, score, grads, dx, buffers):
    """Gradients of a group: score, `grads` and dx.

    score [n] is the gradient of the routing weights, `grads` are those of `factors`. dx[token] += …, unless
    dx has no rows (not needed). As in `_forward`; dy [T, D] bf16 bits, dx [T, D] float32, ones [n] float32.
    """
    D, I = x.shape[1], saved.gate_up.shape[1] // 2
    Q, P = saved.xA.shape[1], saved.hA.shape[1]
    panel, hA, weight = buffers.panel, saved.hA, rows.weight
    for g in range(rows.experts.size):
        e, begin, end = rows.experts[g], rows.begins[g], rows.begins[g + 1]
        r, here = end - begin, slice(begin, end)
        dys, dh, wh, dgu = buffers.dy[:r], buffers.dh[:r], buffers.wh[:r], buffers.dgu[:r]

        # dh = dy W2 + (dy B2ᵀ) A2, before the factor of the routing weight
        _gather(0, r, dy, rows.token[here], dys)
        if P:
            dots(dys[:, :D], factors.B2[g], buffers.dots, buffers.sums, dys[:, D:])
        for first in range(0, I, COLUMNS):
            pack_columns(down, e, first, panel)
            append(factors.A2[g], first, panel, D)
            store(dys, D + P, panel, first, dh)

        # wh = w h; dgu = w times the gradient of gate_up; score = <dh, h>
        _swiglu_backward(0, r, dh, saved.gate_up[here], weight[here], wh, dgu, score[here])

        # dA2 = (dy B2ᵀ)ᵀ (w h); dB2 = (w hA)ᵀ dy
        if P:
            whA = buffers.whA[:r]
            for i in range(r):
                for p in range(P):
                    whA[i, p] = narrow(weight[begin + i] * widen(hA[begin + i, p]), hA[0, 0])
            outer(dys[:, D:], wh, buffers.thin_P, grads.A2[g])
            outer(whA, dys[:, :D], buffers.thin_P, grads.B2[g])

        # dx[token] += dgu W1 + (dgu B1ᵀ) A1; dgu already has the routing weight, hence `ones`
        if Q:
            dots(dgu[:, : 2 * I], factors.B1[g], buffers.dots, buffers.sums, dgu[:, 2 * I :])
        if dx.shape[0]:
            for first in range(0, D, COLUMNS):
                pack_columns(gate_up, e, first, panel)
                append(factors.A1[g], first, panel, 2 * I)
                add(dgu, 2 * I + Q, panel, buffers.sums, first, rows.token[here], ones, dx)

        # dA1 = (dgu B1ᵀ)ᵀ x; dB1 = xAᵀ dgu
        if Q:
            xs = buffers.x[:r]
            _gather(0, r, x, rows.token[here], xs)
            outer(dgu[:, 2 * I :], xs, buffers.thin_Q, grads.A1[g])
            outer(saved.xA[here], dgu[:, : 2 * I], buffers.thin_Q, grads.B1[g])


@functools.cache
def available() -> bool:
    """True if this CPU has AVX512-bf16 and no AMX: bf16 panels are then faster; logged once."""
    pay = bf16_cpu.panels_pay()
    log.info(
        "packed experts in bfloat16: %s",
        "panels of 64 columns" if pay else "a GEMM per expert (this CPU has AMX, or no AVX512-bf16)",
    )
    return pay


def supports(
    dtype: torch.dtype,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    activation: Activation = SWIGLU,
    gate_up_bias: Tensor | None = None,
) -> bool:
    """True if `Panels` can do a call. Its loops support SwiGLU without a bias; others are logged."""
    if activation != SWIGLU or gate_up_bias is not None:
        _say_refused(type(activation).__name__, gate_up_bias is not None)
        return False
    if dtype == torch.float32:
        return all(_reads(base) for base in (gate_up, down))
    packed = all(isinstance(base, Packed) and _reads(base) for base in (gate_up, down))
    return dtype == torch.bfloat16 and packed and available()


def _reads(base: Tensor | Packed) -> bool:
    """True if a loop fills panels from such a base: packed, or frozen in float32 or bf16."""
    if isinstance(base, Packed):
        return expandable(base) and fits(base)
    whole = base.shape[1] % COLUMNS == base.shape[2] % COLUMNS == 0
    known = base.dtype in (torch.float32, torch.bfloat16) and base.device.type == "cpu"
    return whole and known and base.is_contiguous() and not base.requires_grad


@functools.cache
def _say_refused(activation: str, bias: bool) -> None:
    what = f"{activation}{' with a bias' if bias else ''}"
    log.info("expert_mlp: a GEMM per expert; the panels' loops compute SwiGLU without a bias, not %s", what)


class Panels(LoopCpu):
    """The backend of `fused` on CPU if `supports` is true."""

    def padded(self, rows: int, dtype: torch.dtype) -> int:
        return round_up(rows, ROWS)

    def groups(
        self, routing: HostRouting, weight_bytes: tuple[int, int], row_bytes: int, *, both: bool
    ) -> Iterator[HostGroup]:
        """GROUP_EXPERTS at a time: no buffer holds more than one expert's rows."""
        ends = np.cumsum([0, *routing.sizes]).tolist()
        for first in range(0, len(routing.experts), GROUP_EXPERTS):
            end = min(first + GROUP_EXPERTS, len(routing.experts))
            yield ExpertGroup(routing, slice(first, end), slice(ends[first], ends[end]))

    def forward_group(
        self, call: Call[HostRouting], group: HostGroup, x: Tensor, saved: SavedRows, y: Tensor
    ) -> None:
        D, I, Q, P, most = x.shape[1], call.I, call.Q, call.P, max(group_sizes(group))
        room = _Room(call.dtype)

        def rows_of(name: str, tensor: Tensor | None, columns: int) -> np.ndarray:
            return room.rows(name, group.num_rows, columns) if tensor is None else array(tensor[group.rows])

        _forward(
            array(x),
            _rows(group),
            call.gate_up.codes,
            call.down.codes,
            _factors(call, group),
            _Saved(
                gate_up=rows_of("gate_up", saved.gate_up, 2 * I),
                xA=rows_of("xA", saved.xA, Q),
                hA=rows_of("hA", saved.hA, P),
            ),
            array(y),
            _Forward(room.rows("x", most, D + Q), room.rows("h", most, I + P), *room.tile(max(D + Q, I + P))),
        )

    def backward_group(
        self,
        call: Call[HostRouting],
        group: HostGroup,
        x: Tensor,
        dy: Tensor,
        saved: SavedRows,
        score_n: Tensor,
        grads: ExpertGradients,
        dx: Tensor | None,
    ) -> None:
        D, I, Q, P, most = x.shape[1], call.I, call.Q, call.P, max(group_sizes(group))
        room = _Room(call.dtype)

        def rows_of(tensor: Tensor | None) -> np.ndarray:
            return room.none(group.num_rows, 0) if tensor is None else array(tensor[group.rows])

        def grads_of(grad: Tensor | None) -> np.ndarray:
            return np.empty((0, 0, 0), np.float32) if grad is None else array(grad[group.positions])

        _backward(
            array(x),
            array(dy),
            _rows(group),
            np.ones(group.num_rows, np.float32),
            call.gate_up.codes,
            call.down.codes,
            _factors(call, group),
            _Saved(rows_of(saved.gate_up), rows_of(saved.xA), rows_of(saved.hA)),
            array(score_n[group.rows]),
            _Factors(
                A1=grads_of(grads.gate_up_A),
                B1=grads_of(grads.gate_up_Bt),
                A2=grads_of(grads.down_A),
                B2=grads_of(grads.down_Bt),
            ),
            np.empty((0, D), np.float32) if dx is None else array(dx),
            _Backward(
                room.rows("x", most, D),
                room.rows("dy", most, D + P),
                room.rows("dh", most, I),
                room.rows("wh", most, I),
                room.rows("dgu", most, 2 * I + Q),
                room.rows("thin", most, P),
                *room.tile(max(D + P, 2 * I + Q)),
                room.thin("thin Q", most, Q),
                room.thin("thin P", most, P),
            ),
        )


def _rows(group: HostGroup) -> _Rows:
    begins = np.cumsum([0, *group_sizes(group)])
    token = array(group.routing.token_n[group.rows])
    return _Rows(token, array(group.weight), np.asarray(group.experts), begins)


class _Room:
    """Uninitialised memory of this thread for a computation in `dtype`."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.wide = dtype, dtype == torch.float32

    def rows(self, name: str, count: int, columns: int) -> np.ndarray:
        return array(scratch(name, (count, columns), self.dtype, torch.device("cpu")))

    def tile(self, inner: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A panel with `inner` rows of weights, sums, and the scratch of `dots`."""
        if self.wide:
            panel = _floats("panel", COLUMNS // WIDTH, inner, WIDTH)
            return panel, _floats("sums of rows", BLOCK, COLUMNS), _floats("strip", 1, inner, WIDTH)
        return _words("panel", -(-inner // 2), COLUMNS), _floats("tile", ROWS, COLUMNS), _floats("dots", 16)

    def thin(self, name: str, count: int, columns: int) -> np.ndarray:
        """Scratch of `outer` for `count` rows of a thin factor."""
        return _floats(name, columns, count) if self.wide else _words(name, count // 2, columns)

    def none(self, *shape: int) -> np.ndarray:
        """An empty array, if there is nothing to compute."""
        return np.empty(shape, np.float32 if self.wide else np.uint16)


def _words(name: str, *shape: int) -> np.ndarray:
    """Pairs of bf16."""
    return scratch(name, shape, torch.int32, torch.device("cpu")).view(torch.uint32).numpy()


def _floats(name: str, *shape: int) -> np.ndarray:
    return array(scratch(name, shape, torch.float32, torch.device("cpu")))


def _factors(call: Call[HostRouting], group: HostGroup) -> _Factors:
    def pair(adapter: Adapter | None, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
        if adapter is None:
            G, room = len(group.experts), _Room(call.dtype)
            return room.none(G, 0, inputs), room.none(G, 0, outputs)
        return array(adapter.A[group.positions]), array(adapter.Bt[group.positions])

    D, I = call.gate_up.columns, call.I
    return _Factors(*pair(call.gate_up_adapter, D, 2 * I), *pair(call.down_adapter, I, D))
