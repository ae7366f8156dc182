"""The loops around the GEMMs of the expert MLP on CPU.

Sort by expert, gather, SwiGLU forward and backward, weighted scatter-add.

Elements are float32, or bf16 as uint16 bits (see numba_options); arithmetic is float32 with one rounding per
result. numba, because these loops stay in cache, while torch's bf16 elementwise kernels make a pass over
memory per operation.

T tokens, K experts per token, E experts, n rows (a token at one expert; -1 marks a row of padding), D width,
I intermediate width.
"""

from __future__ import annotations

import numpy as np

from unfreeze.kernels.loops.numba_options import ONE, Kernel, inner, narrow, serial, sigmoid, widen


@serial
def count_experts(ids, counts):
    """counts[e] = number of times that e occurs in ids (flat).

    Returns the position of the first id outside 0..E-1, or -1.
    """
    for slot in range(ids.size):
        if ids[slot] < 0 or ids[slot] >= counts.size:
            return slot
        counts[ids[slot]] += 1
    return -1


@serial
def place_rows(ids, weights, per_token, begins, token, weight, row):
    """Stable counting sort: slot t * K + k goes to the next free row of its expert.

    begins[e] is advanced; token is -1 beforehand.
    """
    for slot in range(ids.size):
        here = begins[ids[slot]]
        begins[ids[slot]] += 1
        token[here] = slot // per_token
        weight[here] = weights[slot]
        row[slot] = here


@Kernel
def gather(start, stop, source, token, out):
    """out[r, :D] = source[token[r]], zero for padding; out may be wider, other columns are unchanged."""
    width = source.shape[1]
    for r in range(start, stop):
        target, row = out[r, :width], source[max(token[r], 0)]
        if token[r] < 0:
            target[:] = 0
        else:
            # a slice assignment checks for overlap first and copies slower: 104 us instead of 40, 128 x 1024
            for d in range(width):
                target[d] = row[d]


@Kernel
def scatter_add(start, stop, rows, token, weight, out):
    """out[token[r]] += weight[r] * rows[r] in float32.

    The parts are columns, not rows: no race, a fixed order.
    """
    for r in range(token.size):
        if token[r] >= 0:
            w = weight[r]
            source, target = rows[r, start:stop], out[token[r], start:stop]
            for d in range(source.size):
                target[d] += np.float32(w * widen(source[d]))


@Kernel
def swiglu(start, stop, gate_up, out):
    """out[r, :I] = silu(gate) * up, gate_up [n, 2I] with gate first.

    out may be wider than I; the other columns are unchanged.
    """
    width = gate_up.shape[1] // 2
    for r in range(start, stop):
        gate, up, target = gate_up[r, :width], gate_up[r, width:], out[r, :width]
        for i in range(width):
            g = widen(gate[i])
            target[i] = narrow(np.float32(np.float32(g * sigmoid(g)) * widen(up[i])), gate[i])


@inner
def _score(dh, gate, up):
    """Σ_i dh[i] silu(gate[i]) up[i].

    A separate loop: with a fourth output LLVM stops vectorising (515 us instead of 84, 128 x 512).
    """
    # sixteen parallel sums: a float sum is vectorised only if the code fixes its order
    lanes = np.zeros(16, np.float32)
    whole = dh.size // 16 * 16
    for i in range(0, whole, 16):
        for j in range(16):
            g = widen(gate[i + j])
            lanes[j] += np.float32(
                np.float32(widen(dh[i + j]) * np.float32(g * sigmoid(g))) * widen(up[i + j])
            )
    total = np.float32(0.0)
    for j in range(16):
        total += lanes[j]
    for i in range(whole, dh.size):
        g = widen(gate[i])
        total += np.float32(np.float32(widen(dh[i]) * np.float32(g * sigmoid(g))) * widen(up[i]))
    return total


@Kernel
def swiglu_backward(start, stop, grad, gate_up, weight, weighted, grad_gate_up, score):
    """From the *unweighted* gradient dh of h = silu(g) u, with w the routing weight of the row.

    weighted = w h            the factor of dW and dA of the down projection
    grad_gate_up[:, :2I] = w dh u silu'(g) | w dh silu(g)
    score = <dh, h>           the gradient of w, with no second pass through the down projection
    """
    width = gate_up.shape[1] // 2
    for r in range(start, stop):
        gate, up, dh = gate_up[r, :width], gate_up[r, width:], grad[r]
        dgate, dup, h = grad_gate_up[r, :width], grad_gate_up[r, width : 2 * width], weighted[r]
        w = weight[r]
        for i in range(width):
            g, u, d = widen(gate[i]), widen(up[i]), widen(dh[i])
            s = sigmoid(g)
            silu = np.float32(g * s)
            wd = np.float32(w * d)
            h[i] = narrow(np.float32(w * np.float32(silu * u)), gate[i])
            dgate[i] = narrow(
                np.float32(np.float32(wd * u) * np.float32(s + np.float32(silu * np.float32(ONE - s)))),
                gate[i],
            )
            dup[i] = narrow(np.float32(wd * silu), gate[i])
        score[r] = _score(dh, gate, up)
