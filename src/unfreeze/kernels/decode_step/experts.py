"""The operations of a mixture of experts in a step: choose, sort by expert, then the experts' two products.

S sequences, E experts, K of them per sequence, n = S K rows, A experts in use, D model width, I expert width.
Arguments as in ops.py.
"""

from __future__ import annotations

import math

import numpy as np

from unfreeze.kernels.decode_step.atomic import every, floats, integers
from unfreeze.kernels.decode_step.dots import FLOAT32
from unfreeze.kernels.decode_step.pointer import Callee, call_products
from unfreeze.kernels.decode_step.rows import activated, copy, pack
from unfreeze.kernels.decode_step.thin import (
    CACHED,
    FRESH,
    NUMBERS,
    ZERO,
    add_of_slots,
    add_thin,
    of_slot,
    same_slot,
)
from unfreeze.kernels.loops.numba_options import inner, sigmoid

SIGMOID, SOFTMAX, LOGITS = 0, 1, 2
UP_ROWS, DOWN_ROWS = 64, 32  # weight rows of a job


@inner
def _best(scores, count, ids):
    """ids of the `count` largest scores, largest first; of equal ones the lower id. Overwrites the chosen.

    NaN counts as the largest number, as in torch: it then reaches the logits, where generation stops.
    """
    for e in range(scores.size):
        if math.isnan(scores[e]):
            scores[e] = np.inf
    for k in range(count):
        best = -1
        for e in range(scores.size):  # NaN: chosen already. -inf can still be chosen, once
            if not math.isnan(scores[e]) and (best < 0 or scores[e] > scores[best]):
                best = e
        ids[k] = best
        scores[best] = np.nan


@Callee
def choose(like, job, rows, arguments, numbers):
    """ids [S, K] and weights [S, K] of row `job` (models/blocks/routers.py, RoutingRule).

    logits float32 [S, E]; correction, per_expert: float32 [E]. f: smallest, added, scale.
    """
    a, f = every(arguments), floats(numbers, NUMBERS)
    logits, stride, experts, K, score, correction, groups, keep, best, normalize, after, per_expert = a[:12]
    ids, weights = a[12:14]
    z = floats(logits + job * stride, experts)
    s, rank = np.empty(experts, np.float32), np.empty(experts, np.float32)
    if score == SIGMOID:
        for e in range(experts):
            s[e] = sigmoid(z[e])
    elif score == LOGITS:
        copy(z, s)
    else:
        largest, total = np.float32(-np.inf), np.float32(0.0)
        for e in range(experts):
            largest = max(largest, z[e])
        for e in range(experts):
            s[e] = np.float32(math.exp(z[e] - largest))
            total += s[e]
        for e in range(experts):
            s[e] /= total
    for e in range(experts):
        rank[e] = s[e] + floats(correction, experts)[e] if correction else s[e]
    if groups > 1:
        size = experts // groups
        of_group, part = np.zeros(groups, np.float32), np.empty(size, np.float32)
        top, kept = np.empty(best, np.int64), np.empty(keep, np.int64)
        for g in range(groups):
            copy(rank[g * size : (g + 1) * size], part)
            _best(part, best, top)
            for k in range(best):
                of_group[g] += rank[g * size + top[k]]
        _best(of_group, keep, kept)
        for g in range(groups):
            stays = False
            for k in range(keep):
                stays |= kept[k] == g
            if not stays:
                rank[g * size : (g + 1) * size] = -np.inf
    chosen, w = integers(ids + 8 * job * K, K), floats(weights + 4 * job * K, K)
    _best(rank, K, chosen)
    total = np.float32(0.0)
    for k in range(K):
        w[k] = sigmoid(s[chosen[k]]) if after else s[chosen[k]]
        total += w[k]
    for k in range(K):
        if normalize:
            w[k] /= max(total, f[0]) + f[1]
        w[k] *= f[2]
        if per_expert:
            w[k] *= floats(per_expert, experts)[chosen[k]]


@Callee
def sort(like, job, rows, arguments, numbers):
    """The n rows by expert, in the order of the sequences.

    used: int64, A. experts [E]: the first A are those in use; begins [E + 1]: their first rows. token [n] and
    weight [n]: of each row.
    """
    a = every(arguments)
    ids, weights, K, num_experts, used, experts, begins, token, weight = a[:9]
    n = rows * K
    chosen, share = integers(ids, n), floats(weights, n)
    counts = np.zeros(num_experts + 1, np.int64)
    for r in range(n):
        counts[chosen[r] + 1] += 1
    in_use, starts = integers(experts, num_experts), integers(begins, num_experts + 1)
    A = 0
    starts[0] = 0
    for e in range(num_experts):
        if counts[e + 1]:
            in_use[A] = e
            A += 1
            starts[A] = starts[A - 1] + counts[e + 1]
        counts[e + 1] += counts[e]
    tokens, sorted_weights = integers(token, n), floats(weight, n)
    for r in range(n):
        place = counts[chosen[r]]
        counts[chosen[r]] += 1
        tokens[place], sorted_weights[place] = r // K, share[r]
    integers(used, 1)[0] = A


@Callee
def thin(like, job, rows, arguments, numbers):
    """t[r, q] = A_e[q] · x_r for the rows of the expert in use number `job`.

    gathered: x of a row is that of its sequence. With a table of slots each row has its own A, of `parts`
    times its rank rows; nothing without one.
    """
    a = every(arguments)
    tile, A, stride, height, width, x, x_stride, gathered, experts, begins, token, out, out_stride = a[:13]
    slots, of_slots, parts = a[13:16]
    starts = integers(begins, job + 2)
    begin, end = starts[job], starts[job + 1]
    tokens = integers(token, end)
    xs, sums = np.empty(4, np.int64), np.empty(4 * height, np.float32)
    expert = integers(experts, job + 1)[job]
    r = begin
    while r < end:
        n = min(4, end - r)
        if of_slots:
            n = same_slot(slots, token, r, end)
            A, _, rank, _ = of_slot(slots, of_slots, tokens[r])
            height = parts * rank
        for j in range(4):
            row = min(r + j, r + n - 1)
            xs[j] = x + (tokens[row] if gathered else row) * x_stride
        if A:
            call_products(
                tile, like, height, FRESH, A + expert * height * stride, stride, 0, 0, 0, 0, width,
                xs.ctypes.data, n, sums.ctypes.data,
            )  # fmt: skip
            for j in range(n):
                to = floats(out + (r + j) * out_stride, height)
                for q in range(height):
                    to[q] = sums[j * height + q]
        r += n


@Callee
def up(like, job, rows, arguments, numbers):
    """h[r] = act(gate, up) of the row's expert, packed: UP_ROWS of its I numbers.

    Rows of the weight: gate first, then up; or alternating if `interleaved`. weight: of each row, if it
    scales the expert's input and not its output (Llama 4); else 0. f: the adapter's scale, alpha, limit.
    """
    a, f = every(arguments), floats(numbers, NUMBERS)
    tile, codes, stride, scales, scale_stride, table, group, width, I, interleaved = a[:10]
    x, x_stride, experts, begins, token, h, h_stride, act, bias = a[10:19]
    thin, thin_stride, rank, B, B_kind, B_tile, weight, slots, of_slots = a[19:28]
    blocks = (I + UP_ROWS - 1) // UP_ROWS
    place, first = job // blocks, job % blocks * UP_ROWS
    size = min(UP_ROWS, I - first)
    starts = integers(begins, place + 2)
    begin, end = starts[place], starts[place + 1]
    tokens = integers(token, end)
    expert = integers(experts, place + 1)[place] * 2 * I
    xs, sums = np.empty(4, np.int64), np.empty((2, 4 * UP_ROWS), np.float32)
    result = np.empty(size, np.float32)
    B_stride = rank * (4 if B_kind == FLOAT32 else 2)
    between = 2 if interleaved else 1  # rows of the weight from one of gate's to the next
    for r in range(begin, end, 4):
        n = min(4, end - r)
        for j in range(4):
            xs[j] = x + tokens[min(r + j, end - 1)] * x_stride
        for half in range(2):
            row = expert + (2 * first + half if interleaved else half * I + first)
            call_products(
                tile, like, size, FRESH if n == 1 else CACHED, codes + row * stride, between * stride,
                scales + row * scale_stride, between * scale_stride, table, group, width, xs.ctypes.data, n,
                sums[half].ctypes.data,
            )  # fmt: skip
            if of_slots:
                add_of_slots(
                    B_tile, slots, of_slots, token, r, n, expert // (2 * I), half, half * I + first, size,
                    2 * I, thin, thin_stride, sums[half],
                )  # fmt: skip
            elif thin:  # B lies as gate, then up, whatever the weight's order
                low, of_expert = thin + r * thin_stride + 4 * half * rank, B + expert * B_stride
                add_thin(
                    B_tile, B_kind, of_expert, half * I + first, size, 2 * I, rank, low, thin_stride, n,
                    f[0], sums[half],
                )  # fmt: skip
            for j in range(n):
                value = sums[half, j * size : (j + 1) * size]
                if weight:
                    factor = floats(weight, end)[r + j]
                    for k in range(size):
                        value[k] *= factor
                if bias:
                    all_ = floats(bias, expert + 2 * I)
                    for k in range(size):
                        value[k] += all_[row + between * k]
        for j in range(n):
            gate, up = sums[0, j * size : (j + 1) * size], sums[1, j * size : (j + 1) * size]
            for i in range(size):
                result[i] = activated(act, gate[i], up[i], f[1], f[2])
            pack(like, result, first, h + (r + j) * h_stride)


@Callee
def down(like, job, rows, arguments, numbers):
    """y[s] = add[s] + Σ weight · (down h + f0 B t) over its experts, in order: DOWN_ROWS of D numbers."""
    a, f = every(arguments), floats(numbers, NUMBERS)
    tile, codes, stride, scales, scale_stride, table, group, width, D = a[:9]
    h, h_stride, used, experts, begins, token, weight, y, y_stride, add, add_stride, bias = a[9:21]
    thin, thin_stride, rank, B, B_kind, B_tile, slots, of_slots = a[21:29]
    B_stride = rank * (4 if B_kind == FLOAT32 else 2)
    first = job * DOWN_ROWS
    size = min(DOWN_ROWS, D - first)
    for s in range(rows):
        to = floats(y + s * y_stride, D)[first : first + size]
        if add:
            copy(floats(add + s * add_stride, D)[first : first + size], to)
        else:
            to[:] = np.float32(0.0)
    A = integers(used, 1)[0]
    in_use, starts = integers(experts, A), integers(begins, A + 1)
    tokens = integers(token, starts[A])
    xs, sums = np.empty(4, np.int64), np.empty(4 * DOWN_ROWS, np.float32)
    for place in range(A):
        begin, end = starts[place], starts[place + 1]
        row = in_use[place] * D + first
        for r in range(begin, end, 4):
            n = min(4, end - r)
            for j in range(4):
                xs[j] = h + min(r + j, end - 1) * h_stride
            call_products(
                tile, like, size, FRESH if n == 1 else CACHED, codes + row * stride, stride,
                scales + row * scale_stride, scale_stride, table, group, width, xs.ctypes.data, n,
                sums.ctypes.data,
            )  # fmt: skip
            if of_slots:
                add_of_slots(
                    B_tile, slots, of_slots, token, r, n, in_use[place], ZERO, first, size, D, thin,
                    thin_stride, sums,
                )  # fmt: skip
            elif thin:
                low, of_expert = thin + r * thin_stride, B + in_use[place] * D * B_stride
                add_thin(
                    B_tile, B_kind, of_expert, first, size, D, rank, low, thin_stride, n, f[0], sums
                )  # fmt: skip
            for j in range(n):
                value = sums[j * size : (j + 1) * size]
                if bias:
                    more = floats(bias + 4 * row, size)
                    for k in range(size):
                        value[k] += more[k]
                to = floats(y + tokens[r + j] * y_stride, D)[first : first + size]
                share = floats(weight, end)[r + j] if weight else np.float32(1.0)
                for k in range(size):
                    to[k] += share * value[k]
