"""The rotation on CPU as one loop over tokens. rotate() as in reference.py, float32 and bf16; x and y [T, H, d] with last stride 1."""

from __future__ import annotations

import numpy as np
from numba import prange
from torch import Tensor

from unfreeze.kernels.numba_options import Kernel, array, narrow, widen


@Kernel
def _halves_to_halves(x, x_token, x_head, cos, sin, sign, y, tokens, heads, width):
    pairs = cos.shape[1]
    begin = width - 2 * pairs
    for t in prange(tokens):
        c, s = cos[t], sin[t]
        for h in range(heads):
            source = x[t * x_token + h * x_head : t * x_token + h * x_head + width]
            target = y[(t * heads + h) * width : (t * heads + h + 1) * width]
            for i in range(begin):
                target[i] = source[i]
            a, b = source[begin : begin + pairs], source[begin + pairs :]
            y_a, y_b = target[begin : begin + pairs], target[begin + pairs :]
            for i in range(pairs):
                u, v, sine = widen(a[i]), widen(b[i]), np.float32(s[i] * sign)
                y_a[i] = narrow(np.float32(np.float32(u * c[i]) - np.float32(v * sine)), a[i])
                y_b[i] = narrow(np.float32(np.float32(v * c[i]) + np.float32(u * sine)), a[i])


@Kernel
def _adjacent_to_halves(x, x_token, x_head, cos, sin, sign, y, tokens, heads, width):
    pairs = cos.shape[1]
    begin = width - 2 * pairs
    for t in prange(tokens):
        c, s = cos[t], sin[t]
        for h in range(heads):
            source = x[t * x_token + h * x_head : t * x_token + h * x_head + width]
            target = y[(t * heads + h) * width : (t * heads + h + 1) * width]
            for i in range(begin):
                target[i] = source[i]
            pair, y_a, y_b = source[begin:], target[begin : begin + pairs], target[begin + pairs :]
            for i in range(pairs):
                u, v, sine = widen(pair[2 * i]), widen(pair[2 * i + 1]), np.float32(s[i] * sign)
                y_a[i] = narrow(np.float32(np.float32(u * c[i]) - np.float32(v * sine)), pair[i])
                y_b[i] = narrow(np.float32(np.float32(v * c[i]) + np.float32(u * sine)), pair[i])


@Kernel
def _halves_to_adjacent(x, x_token, x_head, cos, sin, sign, y, tokens, heads, width):
    pairs = cos.shape[1]
    begin = width - 2 * pairs
    for t in prange(tokens):
        c, s = cos[t], sin[t]
        for h in range(heads):
            source = x[t * x_token + h * x_head : t * x_token + h * x_head + width]
            target = y[(t * heads + h) * width : (t * heads + h + 1) * width]
            for i in range(begin):
                target[i] = source[i]
            a, b, pair = source[begin : begin + pairs], source[begin + pairs :], target[begin:]
            for i in range(pairs):
                u, v, sine = widen(a[i]), widen(b[i]), np.float32(s[i] * sign)
                pair[2 * i] = narrow(np.float32(np.float32(u * c[i]) - np.float32(v * sine)), a[i])
                pair[2 * i + 1] = narrow(np.float32(np.float32(v * c[i]) + np.float32(u * sine)), a[i])


_LOOPS = {(False, False): _halves_to_halves, (True, False): _adjacent_to_halves, (False, True): _halves_to_adjacent}


def rotate(x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, sign: float, read_adjacent: bool, write_adjacent: bool, y_THd: Tensor) -> None:
    """y contiguous."""
    tokens, heads, width = x_THd.shape
    if not x_THd.numel():
        return
    extent = (tokens - 1) * x_THd.stride(0) + (heads - 1) * x_THd.stride(1) + width
    x = array(x_THd.detach().as_strided((extent,), (1,)))
    loop = _LOOPS[read_adjacent, write_adjacent]
    loop(
        x_THd.numel(), x, x_THd.stride(0), x_THd.stride(1), array(cos_Tr.contiguous()), array(sin_Tr.contiguous()), np.float32(sign),
        array(y_THd.view(-1)), tokens, heads, width,
    )  # fmt: skip
