"""The operations of a step, as loops over jobs. Each takes (like, job, rows, arguments, numbers).

like  a dummy number that chooses the arithmetic (dots.py)      rows  number of sequences S
arguments, numbers  addresses of the operation's int64 and float32 arguments: a and f
The order of `a` is that of the unpacking in each first line; program.py fills it. "stride" is in bytes,
"width" in elements; an address of 0 means that the part is absent.

A job writes numbers that no other job of the operation writes, and sums in a fixed order, so the result does
not depend on which core takes it.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from unfreeze.kernels.decode_step.atomic import every, floats, integers
from unfreeze.kernels.decode_step.dots import FLOAT32
from unfreeze.kernels.decode_step.pointer import Callee, call_products
from unfreeze.kernels.decode_step.rows import (
    activated,
    combine,
    copy,
    dot,
    pack,
    size_of,
    softmax,
    squares,
    store,
)
from unfreeze.kernels.decode_step.thin import CACHED, FRESH, NUMBERS, ZERO, add_of_slots, add_thin, of_slot
from unfreeze.kernels.loops.bf16_tile import LINE, prefetch
from unfreeze.kernels.loops.numba_options import inner, sigmoid

LINEAR_ROWS = 32  # weight rows of a job: 64 KiB in bf16 at width 1,024
ACT_WIDTH = 512  # numbers of a job of `activate`
POSITIONS = 32  # of the cache, whose scores are computed together
NEAR = 1 << 19  # bytes of values that are prefetched with the keys; more would leave a core's cache again


@numba.njit(inline="always")
def _clip(x, cap):
    """cap · tanh(x / cap)."""
    return np.float32(cap * math.tanh(x / cap))


@Callee
def norm(like, job, rows, arguments, numbers):
    """out = gain · x / sqrt(mean(x²) + eps), for each of `groups` parts of row `job`."""
    a, f = every(arguments), floats(numbers, NUMBERS)
    x, x_stride, gain, width, groups, out, out_stride, packed, packed_stride = a[:9]
    source = floats(x + job * x_stride, groups * width)
    target = floats(out + job * out_stride, groups * width)
    factors = floats(gain, width)
    for g in range(groups):
        part, to = source[g * width : (g + 1) * width], target[g * width : (g + 1) * width]
        scale = np.float32(1.0) / np.float32(math.sqrt(squares(part) / np.float32(width) + f[0]))
        for i in range(width):
            to[i] = factors[i] * (part[i] * scale)
    if packed:
        pack(like, target, ZERO, packed + job * packed_stride)


@Callee
def pack_rows(like, job, rows, arguments, numbers):
    """Row `job` in packed form."""
    a = every(arguments)
    x, x_stride, width, packed, packed_stride = a[:5]
    pack(like, floats(x + job * x_stride, width), ZERO, packed + job * packed_stride)


@Callee
def linear(like, job, rows, arguments, numbers):
    """y[s] = add[s] + f0 · (W x[s] + bias + f1 · B t[s]), for LINEAR_ROWS rows of W.

    t = A x of an adapter; with a table of slots, of each row's own.
    """
    a, f = every(arguments), floats(numbers, NUMBERS)
    tile, codes, stride, scales, scale_stride, table, group, width, height = a[:9]
    x, x_stride, y, y_stride, bias, add, add_stride, thin, thin_stride, rank, B, B_kind, B_tile = a[9:22]
    slots, of_slots = a[22:24]
    first = job * LINEAR_ROWS
    count = min(LINEAR_ROWS, height - first)
    codes, scales = codes + first * stride, scales + first * scale_stride
    xs, out = np.empty(4, np.int64), np.empty((4, LINEAR_ROWS), np.float32)
    sums = out.reshape(-1)
    for s in range(0, rows, 4):
        n = min(4, rows - s)
        for j in range(4):
            xs[j] = x + min(s + j, rows - 1) * x_stride
        call_products(
            tile, like, count, FRESH if s == 0 else CACHED, codes, stride, scales, scale_stride, table, group,
            width, xs.ctypes.data, n, out.ctypes.data,
        )  # fmt: skip
        if of_slots:
            add_of_slots(
                B_tile, slots, of_slots, ZERO, s, n, ZERO, ZERO, first, count, height, thin, thin_stride,
                sums,
            )  # fmt: skip
        elif thin:
            low = thin + s * thin_stride
            add_thin(
                B_tile, B_kind, B, first, count, height, rank, low, thin_stride, n, f[1], sums
            )  # fmt: skip
        for j in range(n):
            value = sums[j * count : (j + 1) * count]
            if bias:
                more = floats(bias + 4 * first, count)
                for k in range(count):
                    value[k] += more[k]
            target = floats(y + (s + j) * y_stride, height)[first : first + count]
            if add:
                source = floats(add + (s + j) * add_stride, height)[first : first + count]
                for k in range(count):
                    target[k] = source[k] + f[0] * value[k]
            else:
                for k in range(count):
                    target[k] = f[0] * value[k]


@Callee
def activate(like, job, rows, arguments, numbers):
    """out[s] = act(gate[s], up[s]) for a part of row s; without `up` the activation has no gate."""
    a, f = every(arguments), floats(numbers, NUMBERS)
    gate, gate_stride, up, up_stride, width, out, out_stride, packed, packed_stride, kind = a[:10]
    parts = (width + ACT_WIDTH - 1) // ACT_WIDTH
    s, first = job // parts, job % parts * ACT_WIDTH
    size = min(ACT_WIDTH, width - first)
    g = floats(gate + s * gate_stride + 4 * first, size)
    u = floats((up if up else gate) + s * (up_stride if up else gate_stride) + 4 * first, size)
    to = floats(out + s * out_stride + 4 * first, size)
    for i in range(size):
        to[i] = activated(kind, g[i], u[i], f[0], f[1])
    if packed:
        pack(like, to, first, packed + s * packed_stride)


@Callee
def add(like, job, rows, arguments, numbers):
    """out[s] = f0 · x[s] + f1 · y[s] (· share[s])."""
    a, f = every(arguments), floats(numbers, NUMBERS)
    x, x_stride, y, y_stride, share, share_stride, width, out, out_stride = a[:9]
    left, to = floats(x + job * x_stride, width), floats(out + job * out_stride, width)
    factor = f[1]
    if share:
        factor *= sigmoid(floats(share + job * share_stride, 1)[0])
    if y:
        right = floats(y + job * y_stride, width)
        for i in range(width):
            to[i] = f[0] * left[i] + factor * right[i]
    else:
        for i in range(width):
            to[i] = f[0] * left[i]


HALVES, ADJACENT, LEADING = 0, 1, 2


@inner
def _rotate(head, cos, sin, pairing, to):
    """The rotation of kernels/rotary: what is not rotated comes first, then both halves."""
    pairs = cos.size
    rest = head.size - 2 * pairs
    begin = 2 * pairs if pairing == LEADING else 0
    for i in range(rest):
        to[i] = head[begin + i]
    for i in range(pairs):
        if pairing == ADJACENT:
            x, y = head[rest + 2 * i], head[rest + 2 * i + 1]
        elif pairing == HALVES:
            x, y = head[rest + i], head[rest + pairs + i]
        else:
            x, y = head[i], head[pairs + i]
        to[rest + i] = x * cos[i] - y * sin[i]
        to[rest + pairs + i] = y * cos[i] + x * sin[i]


@Callee
def rotate_heads(like, job, rows, arguments, numbers):
    """Rotate the heads of row `job` (pairs 0: not at all), scale them, write them to out and the cache.

    cache: address of position 0 of sequence 0; its strides between rows and between positions.
    """
    a = every(arguments)
    x, x_stride, heads, width, cos, sin, pairs, pairing, factor, out, out_stride = a[:11]
    cache, cache_row, cache_position, cache_kind, positions, packed, packed_stride = a[11:18]
    c, s = floats(cos + 4 * job * pairs, pairs), floats(sin + 4 * job * pairs, pairs)
    scale = floats(factor + 4 * job, 1)[0] if factor else np.float32(1.0)
    for h in range(heads):
        head = floats(x + job * x_stride + 4 * h * width, width)
        to = floats(out + job * out_stride + 4 * h * width, width)
        _rotate(head, c, s, pairing, to)
        if factor:
            for i in range(width):
                to[i] *= scale
        if packed:
            size = size_of(like)
            pack(like, to, ZERO, packed + job * packed_stride + size * h * width)
    if cache:
        where = cache + job * cache_row + integers(positions, rows)[job] * cache_position
        store(cache_kind, floats(out + job * out_stride, heads * width), where)


@inner
def _ask(address, stride, first, count, size):
    """Prefetch `size` bytes of each of up to POSITIONS positions from `first` on."""
    for i in range(first, min(first + POSITIONS, count)):
        for line in range(0, size, LINE):
            prefetch(address + i * stride + line)


@inner
def _scores(like, tile, keys, stride, count, width, qs, heads, scale, scores, ahead):
    """scores[h, n] = scale · q_h · k_n for `count` positions; qs: addresses of packed q.

    ahead: address of the values, bytes between positions and of one position; 0: they are not prefetched.
    """
    values, value_stride, value_size, key_size = ahead
    xs, out = np.empty(4, np.int64), np.empty(4 * POSITIONS, np.float32)
    _ask(keys, stride, ZERO, count, key_size)
    for i in range(0, count, POSITIONS):
        size = min(POSITIONS, count - i)
        _ask(keys, stride, i + POSITIONS, count, key_size)
        _ask(values, value_stride, i, count, value_size)
        for h in range(0, heads, 4):
            n = min(4, heads - h)
            for j in range(4):
                xs[j] = qs[min(h + j, heads - 1)]
            call_products(
                tile, like, size, CACHED, keys + i * stride, stride, 0, 0, 0, 0, width, xs.ctypes.data, n,
                out.ctypes.data,
            )  # fmt: skip
            for j in range(n):
                for k in range(size):
                    scores[h + j, i + k] = scale * out[j * size + k]


@Callee
def attend(like, job, rows, arguments, numbers):
    """o = softmax(scale · q kᵀ) v of one sequence and one key head: all its query heads.

    f: scale, softcap (0: none). window, chunk: 0 for none. sinks: float32 [H]. The first positions may lie in
    a prompt that rows share: shared int64 [S, 2] has its slot and length.
    """
    a, f = every(arguments), floats(numbers, NUMBERS)
    q, q_stride, head_stride, heads, groups, width, value_width = a[:7]
    keys, key_row, key_position, key_head, values, value_row, value_position, value_head, kind, tile = a[7:17]
    positions, window, chunk, sinks, out, out_stride, packed, packed_stride = a[17:25]
    shared, key_prompts, key_prompt, value_prompts, value_prompt = a[25:30]
    s, g = job // groups, job % groups
    ours = heads // groups  # query heads of this key head
    position = integers(positions, rows)[s]
    first = 0
    if window:
        first = max(first, position - window + 1)
    if chunk:
        first = max(first, position // chunk * chunk)
    count = position + 1 - first
    slot, prompt = integers(shared, 2 * rows)[2 * s : 2 * s + 2]
    before = max(0, prompt - first)  # positions that lie in the prompt
    qs = np.empty(ours, np.int64)
    for h in range(ours):
        qs[h] = q + s * q_stride + (g * ours + h) * head_stride
    scores = np.empty((ours, count), np.float32)
    number = 4 if kind == FLOAT32 else 2  # bytes
    near = number * value_width if number * value_width * count <= NEAR else 0
    of_prompt = value_prompts + slot * value_prompt + g * value_head + first * value_position
    at = key_prompts + slot * key_prompt + g * key_head + first * key_position
    ahead = of_prompt, value_position, near, number * width
    _scores(like, tile, at, key_position, before, width, qs, ours, f[0], scores[:, :before], ahead)
    of_row = values + s * value_row + g * value_head + (first + before - prompt) * value_position
    at = keys + s * key_row + g * key_head + (first + before - prompt) * key_position
    ahead = of_row, value_position, near, number * width
    _scores(like, tile, at, key_position, count - before, width, qs, ours, f[0], scores[:, before:], ahead)
    for h in range(ours):
        head = g * ours + h
        if f[1] > 0:
            for i in range(count):
                scores[h, i] = _clip(scores[h, i], f[1])
        sink = floats(sinks, heads)[head] if sinks else np.float32(-np.inf)
        share = softmax(scores[h], sink)
        to = floats(out + s * out_stride + 4 * head * value_width, value_width)
        to[:] = np.float32(0.0)
        combine(kind, to, scores[h, :before], of_prompt, value_position)
        combine(kind, to, scores[h, before:], of_row, value_position)
        for i in range(value_width):
            to[i] *= share
        if packed:
            size = size_of(like)
            pack(like, to, ZERO, packed + s * packed_stride + size * head * value_width)


@inner
def _expanded(like, W, W_kind, first, count, width):
    """Rows of a packed weight as float32 (tiles.py, n = 0); nothing of a dense one, read in place."""
    out = np.empty(0 if W_kind >= 0 else count * width, np.float32)
    if out.size:
        tile, codes, stride, scales, scale_stride, table, group = W
        codes, scales = codes + first * stride, scales + first * scale_stride
        call_products(
            tile, like, count, FRESH, codes, stride, scales, scale_stride, table, group, width, 0, 0,
            out.ctypes.data,
        )  # fmt: skip
    return out


@Callee
def into_latent(like, job, rows, arguments, numbers):
    """q_C[s, h] = [W_kᵀ q_nope | q_rope], packed, for head `job` and all rows (`absorbed` in blocks/mla.py).

    W_k: rows of kv_b_proj, nope of them per head, each `latent` wide. An adapter adds B_kᵀ q, then Aᵀ. With a
    table of slots each row has its own, of at most `rank`.
    """
    a, f = every(arguments), floats(numbers, NUMBERS)
    q, q_stride, width, nope, latent, W_kind, head_rows, packed, packed_stride, head_stride = a[:10]
    A, A_kind, B, B_kind, rank = a[10:15]
    W, slots, of_slots, scale = a[15:22], a[22], a[23], f[0]
    size = 4 if W_kind == FLOAT32 else 2
    row = np.empty(latent + width - nope, np.float32)
    low = np.empty(rank, np.float32)
    expanded = _expanded(like, W, W_kind, job * head_rows, nope, latent)
    for s in range(rows):
        head = floats(q + s * q_stride + 4 * job * width, width)
        row[:latent] = np.float32(0.0)
        if W_kind < 0:
            combine(FLOAT32, row[:latent], head[:nope], expanded.ctypes.data, 4 * latent)
        else:
            combine(W_kind, row[:latent], head[:nope], W[1] + job * head_rows * latent * size, latent * size)
        if of_slots:
            A, B, rank, scale = of_slot(slots, of_slots, s)
        if A:
            t = low[:rank]
            t[:] = np.float32(0.0)
            B_size = 4 if B_kind == FLOAT32 else 2
            combine(B_kind, t, head[:nope], B + job * head_rows * rank * B_size, rank * B_size)
            for r in range(rank):
                t[r] *= scale
            combine(A_kind, row[:latent], t, A, latent * (4 if A_kind == FLOAT32 else 2))
        copy(head[nope:], row[latent:])
        pack(like, row, ZERO, packed + s * packed_stride + job * head_stride)


@Callee
def out_of_latent(like, job, rows, arguments, numbers):
    """o[s, h] = W_v · (latents summed by attention), for head `job` and all rows."""
    a, f = every(arguments), floats(numbers, NUMBERS)
    x, x_stride, head_width, latent, W_kind, head_rows, value_first, value_width, out, out_stride = a[:10]
    A, A_kind, B, B_kind, rank, packed, packed_stride = a[10:17]
    W, slots, of_slots, scale = a[17:24], a[24], a[25], f[0]
    size = 4 if W_kind == FLOAT32 else 2
    low = np.empty(rank, np.float32)
    first = job * head_rows + value_first
    expanded = _expanded(like, W, W_kind, first, value_width, latent)
    for s in range(rows):
        row = floats(x + s * x_stride + 4 * job * head_width, latent)
        to = floats(out + s * out_stride + 4 * job * value_width, value_width)
        for i in range(value_width):
            if W_kind < 0:
                to[i] = dot(FLOAT32, row, expanded.ctypes.data + 4 * i * latent)
            else:
                to[i] = dot(W_kind, row, W[1] + (first + i) * latent * size)
        if of_slots:
            A, B, rank, scale = of_slot(slots, of_slots, s)
        if A:
            t = low[:rank]
            for r in range(rank):
                t[r] = scale * dot(A_kind, row, A + r * latent * (4 if A_kind == FLOAT32 else 2))
            for i in range(value_width):
                to[i] += dot(B_kind, t, B + (first + i) * rank * (4 if B_kind == FLOAT32 else 2))
        if packed:
            pack(like, to, ZERO, packed + s * packed_stride + size_of(like) * job * value_width)


@Callee
def cache_latent(like, job, rows, arguments, numbers):
    """Row `job` of the latents: [norm(x[: latent]) | rotate(x[latent :])], into the cache."""
    a, f = every(arguments), floats(numbers, NUMBERS)
    x, x_stride, gain, latent, rope, cos, sin, pairing, cache, cache_row, cache_position, kind, positions = a[
        :13
    ]
    source = floats(x + job * x_stride, latent + rope)
    row = np.empty(latent + rope, np.float32)
    factors = floats(gain, latent)
    scale = np.float32(1.0) / np.float32(math.sqrt(squares(source[:latent]) / np.float32(latent) + f[0]))
    for i in range(latent):
        row[i] = factors[i] * (source[i] * scale)
    pairs = rope // 2
    c, s = floats(cos + 4 * job * pairs, pairs), floats(sin + 4 * job * pairs, pairs)
    _rotate(source[latent:], c, s, pairing, row[latent:])
    where = cache + job * cache_row + integers(positions, rows)[job] * cache_position
    store(kind, row, where)
