"""The rotation on CPU as one loop over tokens.

rotate() as in reference.py, float32 and bf16; x and y [T, H, d] with last stride 1.
"""

from __future__ import annotations

import numba
import numpy as np
from torch import Tensor

from unfreeze.kernels.loops.numba_options import Kernel, array, narrow, widen


@numba.njit(inline="always")
def _head(x, x_token, x_head, y, token, head, heads, width, begin):
    """(x, y) of one head, its elements before `begin` copied."""
    source = x[token * x_token + head * x_head : token * x_token + head * x_head + width]
    target = y[(token * heads + head) * width : (token * heads + head + 1) * width]
    for i in range(begin):
        target[i] = source[i]
    return source, target


@numba.njit(inline="always")
def _turned(a, b, cos, sin, sign):
    u, v, sine = widen(a), widen(b), np.float32(sin * sign)
    first, second = (
        np.float32(np.float32(u * cos) - np.float32(v * sine)),
        np.float32(np.float32(v * cos) + np.float32(u * sine)),
    )
    return narrow(first, a), narrow(second, a)


@Kernel
def _halves_to_halves(start, stop, x, x_token, x_head, cos, sin, sign, y, heads, width):
    pairs = cos.shape[1]
    begin = width - 2 * pairs
    for t in range(start, stop):
        c, s = cos[t], sin[t]
        for h in range(heads):
            source, target = _head(x, x_token, x_head, y, t, h, heads, width, begin)
            a, b = source[begin : begin + pairs], source[begin + pairs :]
            y_a, y_b = target[begin : begin + pairs], target[begin + pairs :]
            for i in range(pairs):
                y_a[i], y_b[i] = _turned(a[i], b[i], c[i], s[i], sign)


@Kernel
def _adjacent_to_halves(start, stop, x, x_token, x_head, cos, sin, sign, y, heads, width):
    pairs = cos.shape[1]
    begin = width - 2 * pairs
    for t in range(start, stop):
        c, s = cos[t], sin[t]
        for h in range(heads):
            source, target = _head(x, x_token, x_head, y, t, h, heads, width, begin)
            pair, y_a, y_b = source[begin:], target[begin : begin + pairs], target[begin + pairs :]
            for i in range(pairs):
                y_a[i], y_b[i] = _turned(pair[2 * i], pair[2 * i + 1], c[i], s[i], sign)


@Kernel
def _halves_to_adjacent(start, stop, x, x_token, x_head, cos, sin, sign, y, heads, width):
    pairs = cos.shape[1]
    begin = width - 2 * pairs
    for t in range(start, stop):
        c, s = cos[t], sin[t]
        for h in range(heads):
            source, target = _head(x, x_token, x_head, y, t, h, heads, width, begin)
            a, b, pair = source[begin : begin + pairs], source[begin + pairs :], target[begin:]
            for i in range(pairs):
                pair[2 * i], pair[2 * i + 1] = _turned(a[i], b[i], c[i], s[i], sign)


_LOOPS = {
    (False, False): _halves_to_halves,
    (True, False): _adjacent_to_halves,
    (False, True): _halves_to_adjacent,
}


def rotate(
    x_THd: Tensor,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    sign: float,
    read_adjacent: bool,
    write_adjacent: bool,
    y_THd: Tensor,
) -> None:
    """y contiguous."""
    tokens, heads, width = x_THd.shape
    if not x_THd.numel():
        return
    extent = (tokens - 1) * x_THd.stride(0) + (heads - 1) * x_THd.stride(1) + width
    x = array(x_THd.detach().as_strided((extent,), (1,)))
    loop = _LOOPS[read_adjacent, write_adjacent]
    loop(
        x_THd.numel(),
        tokens,
        x,
        x_THd.stride(0),
        x_THd.stride(1),
        array(cos_Tr.contiguous()),
        array(sin_Tr.contiguous()),
        np.float32(sign),
        array(y_THd.view(-1)),
        heads,
        width,
    )
