"""The loops of blocked_cpu.py: over rows of scores, and copies of heads between row and block layouts.

S documents of L tokens, H query heads, G key/value heads (H = G · rep), d and v widths, w either of them.
"""

import numpy as np

from unfreeze.kernels.attention.workspace import QUERIES
from unfreeze.kernels.loops.bf16_tile import COLUMNS, ROWS, tile
from unfreeze.kernels.loops.lanes import exponentials, largest
from unfreeze.kernels.loops.numba_options import Kernel, convert, exp, narrow, widen


@Kernel
def softmax(start, stop, scores, first, rows, scale, probs, lse):
    """probs[r, :] = softmax of scale · scores[r, : first + r % rows + 1], zero after that.

    lse[r] is the log-sum-exp of the same. scores are overwritten.
    """
    for r in range(start, stop):
        # row r is query first + r % rows of its head: it sees that many keys and itself
        seen = first + r % rows + 1
        row, target = scores[r, :seen], probs[r]
        # subtract the maximum, so that no exponential overflows
        shift = np.float32(scale * largest(row))
        denominator = exponentials(row, scale, shift)
        lse[r] = np.float32(shift + np.float32(np.log(denominator)))
        share = np.float32(np.float32(1.0) / denominator)
        for i in range(seen):
            target[i] = narrow(np.float32(row[i] * share), target[i])
        target[seen:] = 0


@Kernel
def softmax_backward(start, stop, scores, first, rows, scale, lse, delta, dprobs, probs):
    """probs = P as in softmax; dprobs becomes dS = scale · P (dP - delta)."""
    for r in range(start, stop):
        seen = first + r % rows + 1
        row, p, d = scores[r], probs[r], dprobs[r]
        shift, off = lse[r], delta[r]
        for i in range(seen):
            e = exp(np.float32(np.float32(scale * row[i]) - shift))
            p[i] = narrow(e, p[i])
            d[i] = narrow(np.float32(np.float32(scale * e) * np.float32(widen(d[i]) - off)), d[i])
        p[seen:] = 0
        d[seen:] = 0


@Kernel
def take(start, stop, source, first, count, head, out):
    """out[g, l] = source[first + l, head + g] for l < count, zero after that.

    source [rows, heads, w], out [G, n, w], converted.
    """
    for g in range(start, stop):
        for n in range(out.shape[1]):
            target = out[g, n]
            if n < count:
                row = source[first + n, head + g]
                for i in range(target.size):
                    target[i] = convert(row[i], target[i])
            else:
                target[:] = 0


@Kernel
def put(start, stop, x, first, count, head, out):
    """The inverse of take: out[first + l, head + g] = x[g, l]."""
    for g in range(start, stop):
        for n in range(count):
            target, row = out[first + n, head + g], x[g, n]
            for i in range(target.size):
                target[i] = convert(row[i], target[i])


@Kernel
def take_blocks(start, stop, source, first, count, head, repeat, out):
    """As take, into blocks.

    out[b, g, r · QUERIES + l] = source[first + b · QUERIES + l, head + g · repeat + r]. out [blocks, G,
    rep · QUERIES, w].
    """
    groups = out.shape[1]
    for job in range(start, stop):
        b, g = job // groups, job % groups
        for place in range(out.shape[2]):
            n, h = b * QUERIES + place % QUERIES, head + g * repeat + place // QUERIES
            target = out[b, g, place]
            if n < count:
                row = source[first + n, h]
                for i in range(target.size):
                    target[i] = convert(row[i], target[i])
            else:
                target[:] = 0


@Kernel
def put_blocks(start, stop, x, first, count, head, repeat, out):
    """The inverse of take_blocks."""
    groups = x.shape[1]
    for job in range(start, stop):
        b, g = job // groups, job % groups
        for place in range(x.shape[2]):
            n, h = b * QUERIES + place % QUERIES, head + g * repeat + place // QUERIES
            if n < count:
                target, row = out[first + n, h], x[b, g, place]
                for i in range(target.size):
                    target[i] = convert(row[i], target[i])


@Kernel
def dots(start, stop, a, b, out):
    """out[i, g, place] = a · b of that row; a, b [blocks, G, rep · QUERIES, w]."""
    groups, places = a.shape[1], a.shape[2]
    for job in range(start, stop):
        i, g = job // groups, job % groups
        for place in range(places):
            left, right = a[i, g, place], b[i, g, place]
            dot = np.float32(0.0)
            for w in range(left.size):
                dot += np.float32(widen(left[w]) * widen(right[w]))
            out[i, g, place] = dot


@Kernel
def accumulate(start, stop, share, total):
    """total[g, :keys] += share[g]; share [G, keys, w]."""
    for g in range(start, stop):
        for n in range(share.shape[1]):
            row, target = share[g, n], total[g, n]
            for i in range(row.size):
                target[i] += widen(row[i])


@Kernel
def panels(start, stop, keys, out):
    """out[g, p, k, j] = the pair k of key 64 p + j.

    keys uint32 [G, n, d / 2] (two bf16 each), out [G, n / 64, d / 2, 64].
    """
    for g in range(start, stop):
        for p in range(out.shape[1]):
            for k in range(out.shape[2]):
                line = out[g, p, k]
                for j in range(COLUMNS):
                    line[j] = keys[g, p * COLUMNS + j, k]


@Kernel
def scores(start, stop, q, panels, keys, out):
    """out[g, r, n] = q[g, r] · key n in float32, n < keys.

    q bf16 bits [G, R, d], panels as above, out [G, R, keys].
    """
    whole = keys // COLUMNS
    for job in range(start, stop):
        g, p = job // whole, job % whole
        for row in range(0, q.shape[1], ROWS):
            begin = min(row, q.shape[1] - ROWS)  # the last tile repeats some rows
            here = q.ctypes.data + g * q.strides[0] + begin * q.strides[1]
            there = out.ctypes.data + g * out.strides[0] + begin * out.strides[1] + 4 * COLUMNS * p
            panel = panels.ctypes.data + g * panels.strides[0] + p * panels.strides[1]
            tile(here, q.strides[1], panel, panels.shape[2], there, out.strides[1])
