"""The operations of a mixture of experts in a step: choose, sort by expert, then the experts' two products.

S sequences, E experts, K of them per sequence, n = S K rows, A experts in use, D model width, I expert width.
Arguments as in ops.py.
"""

from __future__ import annotations

import math

import numpy as np

from unfreeze.kernels.decode_step.atomic import floats, integers
from unfreeze.kernels.decode_step.dots import FLOAT32
from unfreeze.kernels.decode_step.ops import ARGUMENTS, DOWN_ROWS, NUMBERS, UP_ROWS
from unfreeze.kernels.decode_step.pointer import Callee, call_products
from unfreeze.kernels.decode_step.rows import activated, dot, pack
from unfreeze.kernels.loops.numba_options import inner, sigmoid

SIGMOID, SOFTMAX, LOGITS = 0, 1, 2


@inner
def _best(scores, count, ids):
    """ids of the `count` largest scores, largest first; of equal ones the lower id. Overwrites the chosen."""
    for k in range(count):
        best = 0
        for e in range(1, scores.size):
            if scores[e] > scores[best]:
                best = e
        ids[k] = best
        scores[best] = -np.inf


@Callee
def choose(like, job, rows, arguments, numbers):
    """ids [S, K] and weights [S, K] of row `job` (models/blocks/routers.py, RoutingRule).

    logits float32 [S, E]; correction, per_expert: float32 [E]. f: smallest, added, scale.
    """
    a, f = integers(arguments, ARGUMENTS), floats(numbers, NUMBERS)
    logits, stride, experts, K, score, correction, groups, keep, best, normalize, after, per_expert = a[:12]
    ids, weights = a[12:14]
    z = floats(logits + job * stride, experts)
    s, rank = np.empty(experts, np.float32), np.empty(experts, np.float32)
    if score == SIGMOID:
        for e in range(experts):
            s[e] = sigmoid(z[e])
    elif score == LOGITS:
        s[:] = z
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
            part[:] = rank[g * size : (g + 1) * size]
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

    used: int64, A. experts [E]: the first A are those in use; begins [E + 1]: their first rows. token [n], weight [n].
    """
    a, f = integers(arguments, ARGUMENTS), floats(numbers, NUMBERS)
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
    """t[r, q] = A_e[q] · x_r for the rows of the expert in use `job`; gathered: x of a row is that of its token."""
    a, f = integers(arguments, ARGUMENTS), floats(numbers, NUMBERS)
    tile, A, stride, height, width, x, x_stride, gathered, experts, begins, token, out, out_stride = a[:13]
    e, begin, end = (
        integers(experts, job + 1)[job],
        integers(begins, job + 1)[job],
        integers(begins, job + 2)[job + 1],
    )
    tokens = integers(token, end)
    xs, totals = np.empty(4, np.int64), np.empty(16, np.float32)
    at = A + e * height * stride
    for r in range(begin, end, 4):
        n = min(4, end - r)
        for j in range(4):
            row = min(r + j, end - 1)
            xs[j] = x + (tokens[row] if gathered else row) * x_stride
        for q in range(height):
            call_products(
                tile, like, 1, at + q * stride, stride, 0, 0, 0, 0, width, xs.ctypes.data, n, totals.ctypes.data
            )  # fmt: skip
            for j in range(n):
                floats(out + (r + j) * out_stride, height)[q] = totals[j]


@Callee
def up(like, job, rows, arguments, numbers):
    """h[r] = act(gate, up) of the row's expert, packed, UP_ROWS of its I numbers; f: adapter's scale, alpha, limit.

    Rows of the weight: gate first, then up; or alternating if `interleaved`. weight: of each row, if it scales the expert's input and not its
    output (Llama 4); else 0.
    """
    a, f = integers(arguments, ARGUMENTS), floats(numbers, NUMBERS)
    tile, codes, stride, scales, scale_stride, table, group, width, I, interleaved = a[:10]
    x, x_stride, experts, begins, token, h, h_stride, act, bias = a[10:19]
    thin, thin_stride, rank, B, B_kind, weight = a[19:25]
    blocks = (I + UP_ROWS - 1) // UP_ROWS
    place, first = job // blocks, job % blocks * UP_ROWS
    e = integers(experts, place + 1)[place]
    begin, end = integers(begins, place + 1)[place], integers(begins, place + 2)[place + 1]
    tokens = integers(token, end)
    size = min(UP_ROWS, I - first)
    xs, out = np.empty(4, np.int64), np.empty(16, np.float32)
    both, result = np.empty((2, 4, UP_ROWS), np.float32), np.empty(size, np.float32)
    B_size = rank * (4 if B_kind == FLOAT32 else 2)
    for r in range(begin, end, 4):
        n = min(4, end - r)
        for j in range(4):
            xs[j] = x + tokens[min(r + j, end - 1)] * x_stride
        # 2 `size` weight rows: one by one for a single x, else four at a time
        step = 1 if n == 1 else 4
        for half in range(2):
            i = 0
            while i < size:
                count = step if i + step <= size and not interleaved else 1
                o = 2 * (first + i) + half if interleaved else half * I + first + i
                at, scale_at = codes + (e * 2 * I + o) * stride, scales + (e * 2 * I + o) * scale_stride
                call_products(
                    tile, like, count, at, stride, scale_at, scale_stride, table, group, width, xs.ctypes.data,
                    n, out.ctypes.data,
                )  # fmt: skip
                for j in range(n):
                    for k in range(count):
                        value = out[j * count + k]
                        if bias:
                            value += floats(bias, (e + 1) * 2 * I)[e * 2 * I + o + k]
                        if thin:
                            low = floats(thin + (r + j) * thin_stride + 4 * half * rank, rank)
                            # B lies as gate, up whatever the weight's order
                            row = e * 2 * I + half * I + first + i + k
                            value += f[0] * dot(B_kind, low, B + row * B_size)
                        if weight:
                            value *= floats(weight, end)[r + j]
                        both[half, j, i + k] = value
                i += count
        for j in range(n):
            for i in range(size):
                result[i] = activated(act, both[0, j, i], both[1, j, i], f[1], f[2])
            pack(like, result, first, h + (r + j) * h_stride)


@Callee
def down(like, job, rows, arguments, numbers):
    """y[s] = add[s] + Σ over the row's experts, in their order, of weight · (down h + f0 B t), for DOWN_ROWS of D."""
    a, f = integers(arguments, ARGUMENTS), floats(numbers, NUMBERS)
    tile, codes, stride, scales, scale_stride, table, group, width, D = a[:9]
    h, h_stride, used, experts, begins, token, weight, y, y_stride, add, add_stride, bias = a[9:21]
    thin, thin_stride, rank, B, B_kind = a[21:26]
    first, last = job * DOWN_ROWS, min((job + 1) * DOWN_ROWS, D)
    for s in range(rows):
        to = floats(y + s * y_stride, D)
        if add:
            source = floats(add + s * add_stride, D)
            to[first:last] = source[first:last]
        else:
            to[first:last] = np.float32(0.0)
    A = integers(used, 1)[0]
    in_use, starts = integers(experts, A), integers(begins, A + 1)
    tokens = integers(token, starts[A])
    xs, out = np.empty(4, np.int64), np.empty(16, np.float32)
    B_size = rank * (4 if B_kind == FLOAT32 else 2)
    for place in range(A):
        e, begin, end = in_use[place], starts[place], starts[place + 1]
        for r in range(begin, end, 4):
            n = min(4, end - r)
            for j in range(4):
                xs[j] = h + min(r + j, end - 1) * h_stride
            step = 1 if n == 1 else 4
            d = first
            while d < last:
                count = step if d + step <= last else 1
                at, scale_at = codes + (e * D + d) * stride, scales + (e * D + d) * scale_stride
                call_products(
                    tile, like, count, at, stride, scale_at, scale_stride, table, group, width, xs.ctypes.data,
                    n, out.ctypes.data,
                )  # fmt: skip
                for j in range(n):
                    to = floats(y + tokens[r + j] * y_stride, D)
                    for k in range(count):
                        value = out[j * count + k]
                        if bias:
                            value += floats(bias, (e + 1) * D)[e * D + d + k]
                        if thin:
                            low = floats(thin + (r + j) * thin_stride, rank)
                            value += f[0] * dot(B_kind, low, B + (e * D + d + k) * B_size)
                        to[d + k] += floats(weight, end)[r + j] * value if weight else value
                d += count
