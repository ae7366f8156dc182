"""Rows of numbers in a step's two forms: float32 in order, and packed as the products read them (dots.py).

All of it runs inside numba loops. Addresses are int64.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.core import types
from numba.extending import overload

from unfreeze.kernels.decode_step.atomic import floats, words
from unfreeze.kernels.decode_step.codes import CHUNK
from unfreeze.kernels.decode_step.dots import FLOAT32
from unfreeze.kernels.loops.lanes import largest as largest_of
from unfreeze.kernels.loops.numba_options import LINKED, exp, inlined, inner, narrow, sigmoid, widen

SUMS: dict = LINKED | {"fastmath": {"reassoc", "contract"}}
"""Options of a loop whose float32 sum the compiler may order: in vectors, the same at every call."""


def pack(like, row, first, address):  # pragma: no cover - body below
    """Write a part of a row in packed form. `first` is a multiple of 32."""
    raise NotImplementedError("only inside numba loops")


@overload(pack, inline="never")
def _pack(like, row, first, address):
    if like == types.uint16:

        def as_bf16(like, row, first, address):
            out = words(address + 2 * first, row.size)
            for i in range(row.size):
                out[i] = narrow(row[i], like)

        return as_bf16

    def split(like, row, first, address):
        out = floats(address + 4 * first, row.size)
        whole = row.size // CHUNK * CHUNK
        for start in range(0, whole, CHUNK):
            for i in range(CHUNK // 2):
                out[start + i] = row[start + 2 * i]
                out[start + CHUNK // 2 + i] = row[start + 2 * i + 1]
        for i in range(whole, row.size):
            out[i] = row[i]

    return split


@inlined
def copy(source, target):
    """target = source. A slice assignment compiles the text of its error too, for 3 s in each process."""
    for i in range(target.size):
        target[i] = source[i]


def size_of(like):  # pragma: no cover - body below
    """Bytes of a packed number."""
    raise NotImplementedError("only inside numba loops")


@overload(size_of, inline="always")
def _size_of(like):
    return (lambda like: 2) if like == types.uint16 else (lambda like: 4)


@inner
def store(kind, row, address):
    """Write a row as float32 or bf16."""
    if kind == FLOAT32:
        out = floats(address, row.size)
        for i in range(row.size):
            out[i] = row[i]
    else:
        bits = words(address, row.size)
        for i in range(row.size):
            bits[i] = narrow(row[i], bits[i])


@numba.njit(**SUMS)
def dot(kind, row, address):
    """Σ row[i] w[i], w float32 or bf16 in memory order."""
    total = np.float32(0.0)
    if kind == FLOAT32:
        w = floats(address, row.size)
        for i in range(row.size):
            total += row[i] * w[i]
    else:
        bits = words(address, row.size)
        for i in range(row.size):
            total += row[i] * widen(bits[i])
    return total


@numba.njit(**SUMS)
def squares(row):
    """Σ row[i]²."""
    total = np.float32(0.0)
    for i in range(row.size):
        total += row[i] * row[i]
    return total


@numba.njit(**SUMS)
def add_scaled(kind, out, factor, address):
    """out += factor · w."""
    if kind == FLOAT32:
        w = floats(address, out.size)
        for i in range(out.size):
            out[i] += factor * w[i]
    else:
        bits = words(address, out.size)
        for i in range(out.size):
            out[i] += factor * widen(bits[i])


@numba.njit(**SUMS)
def add_four(kind, out, f0, f1, f2, f3, a0, a1, a2, a3):
    """out += f0 · w0 + … + f3 · w3: one pass over out for four rows."""
    n = out.size
    if kind == FLOAT32:
        u0, u1, u2, u3 = floats(a0, n), floats(a1, n), floats(a2, n), floats(a3, n)
        for i in range(n):
            out[i] += f0 * u0[i] + f1 * u1[i] + f2 * u2[i] + f3 * u3[i]
    else:
        w0, w1, w2, w3 = words(a0, n), words(a1, n), words(a2, n), words(a3, n)
        for i in range(n):
            out[i] += f0 * widen(w0[i]) + f1 * widen(w1[i]) + f2 * widen(w2[i]) + f3 * widen(w3[i])


@inner
def combine(kind, out, factors, address, stride):
    """out += Σ_j factors[j] · the row at address + j · stride."""
    whole = factors.size // 4 * 4
    for j in range(0, whole, 4):
        a = address + j * stride
        add_four(
            kind,
            out,
            factors[j],
            factors[j + 1],
            factors[j + 2],
            factors[j + 3],
            a,
            a + stride,
            a + 2 * stride,
            a + 3 * stride,
        )
    for j in range(whole, factors.size):
        add_scaled(kind, out, factors[j], address + j * stride)


SILU, GELU, RELU2, CLAMPED = 0, 1, 2, 3
ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU, "gelu": GELU, "relu2": RELU2, "clamped": CLAMPED}
"""By the names of nonlinearity.py and swiglu/activation.py."""


@inlined
def activated(kind, gate, up, alpha, limit):
    """silu(g) u, gelu(g) u, relu(g)², or gpt-oss's clamped SwiGLU (kernels/swiglu/activation.py)."""
    if kind == SILU:
        return gate * sigmoid(gate) * up
    if kind == GELU:
        inner_ = np.float32(0.7978845608028654) * (gate + np.float32(0.044715) * gate * gate * gate)
        # tanh(z) = 2 sigmoid(2 z) - 1
        return np.float32(gate * sigmoid(np.float32(np.float32(2.0) * inner_)) * up)
    if kind == RELU2:
        positive = max(gate, np.float32(0.0))
        return positive * positive
    g, u = min(gate, limit), max(min(up, limit), -limit)
    return (u + np.float32(1.0)) * (g * sigmoid(g * alpha))


@numba.njit(**SUMS)
def _total(row):
    total = np.float32(0.0)
    for i in range(row.size):
        total += row[i]
    return total


@inner
def softmax(scores, sink):
    """Replace scores by exp(score - largest); return 1 / their sum. sink: one more score, -inf for none."""
    largest = max(sink, largest_of(scores))
    for i in range(scores.size):
        scores[i] = exp(scores[i] - largest)
    total = _total(scores)
    if sink > -np.inf:
        total += exp(sink - largest)
    return np.float32(1.0) / total
