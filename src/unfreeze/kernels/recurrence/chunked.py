"""A segment of a linear recurrence in chunks: products within a chunk, and one update of the state per chunk.

With G_t the sum of g from the chunk's start to t, and S_0 the state before the chunk:

    u_t = β_t (v_t - exp(G_t) S_0ᵀ k_t) - Σ_{j<t} A_tj u_j,   A_tj = β_t (k_t · exp(G_t - G_j) k_j)
    o_t = S_0ᵀ (exp(G_t) q_t) + Σ_{j<=t} (q_t · exp(G_t - G_j) k_j) u_j
    S_C = exp(G_C) S_0 + Σ_j exp(G_C - G_j) k_j u_jᵀ

The system of u is triangular: u = (I + A)⁻¹ (β v - β exp(G) k S_0). Without β, u = v.
Every exponent is <= 0, so nothing overflows, whatever the decay.

n chunks, C tokens of a chunk, G key heads, J value heads per key head, k and v widths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from unfreeze.kernels.recurrence.inputs import Inputs, Rule
from unfreeze.kernels.recurrence.segments import CHUNK, CHUNKS, Segment
from unfreeze.kernels.state_scan import state_scan


def segment_forward(
    inputs: Inputs, state_SHkv: Tensor, segment: Segment, rule: Rule
) -> tuple[Tensor, Tensor]:
    """(o [t, H, v], the states of the segment's documents behind it [S, H, k, v]).

    inputs: of the segment's tokens, in float32. state: before the segment.
    """
    q_tGk, k_tGk = rule.prepared(inputs.q, inputs.k)
    n, C, G = segment.chunks, segment.chunk, q_tGk.shape[1]

    def chunks(x: Tensor) -> Tensor:
        """[t, heads, …] -> [n, G, J, C, …]; J = 1 for q and k. Padding is zero: it changes no state."""
        slots = x.new_zeros(n * C, *x.shape[1:]).index_copy(0, segment.slots_t, x)
        return slots.view(n, C, G, -1, *x.shape[2:]).movedim(1, 3)

    q, k, v = chunks(q_tGk), chunks(k_tGk), chunks(inputs.v)
    # float32 sums of a chunk must not lose small decays behind a large one; `faded` makes the least one 0
    total = chunks(inputs.g.clamp(min=LEAST - 1)).cumsum(3)  # [n, G, J, C], or [n, G, J, C, k]
    if inputs.g.dim() == 3:
        qk, kk = decayed_products((q, k), k, total)
        decay, to_end = faded(total), faded(total[..., -1:, :] - total)
    else:
        seen = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
        between = faded((total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf))
        qk = (q @ k.mT) * between
        kk = (k @ k.mT) * between if inputs.beta is not None else between
        decay, to_end = faded(total)[..., None], faded(total[..., -1:] - total)[..., None]
    q_in, k_out, whole = q * decay, (k * to_end).flatten(1, 2), decay[..., -1, :, None].flatten(1, 2)

    u, forget = v, None
    if inputs.beta is not None:
        beta = chunks(inputs.beta)[..., None]
        inverse = _Inverse.apply((beta * kk).tril(-1))
        u, forget = inverse @ (beta * v), (inverse @ (beta * decay * k)).flatten(1, 2)
    # the only sequential part: the state through the chunks of each document
    before, own, after = state_scan(u.flatten(1, 2), forget, k_out, whole, state_SHkv, segment.steps)
    o = q_in @ before.unflatten(1, u.shape[1:3]) + qk @ own.unflatten(1, u.shape[1:3])
    return o.movedim(3, 1).reshape(n * C, -1, o.shape[-1])[segment.slots_t], after


class _Inverse(torch.autograd.Function):
    """X = (I + A)⁻¹ for strictly lower triangular A [..., C, C]; dA = -Xᵀ dX Xᵀ.

    By products: torch's own triangular solver takes 60 % of a backward pass on a CPU. Blocks of BLOCK rows
    are inverted row by row, all at once; then [[X, 0], [-Y A X, Y]] joins two blocks X and Y.
    """

    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        C = A.shape[-1]
        size = min(BLOCK, C)
        blocks = _diagonal(A, size).neg()  # [..., C / size, size, size]
        for row in range(1, size):
            known = blocks[..., row, :row].clone()
            blocks[..., row, :row] += (known[..., None] * blocks[..., :row, :row]).sum(-2)
        X = blocks + torch.eye(size, dtype=A.dtype, device=A.device)
        while size < C:
            below = _diagonal(A, 2 * size)[..., size:, :size]
            first, second = X.unflatten(-3, (-1, 2)).unbind(-3)
            joined = X.new_zeros(*first.shape[:-2], 2 * size, 2 * size)
            joined[..., :size, :size], joined[..., size:, size:] = first, second
            joined[..., size:, :size] = -(second @ below @ first)
            X, size = joined, 2 * size
        X = X.squeeze(-3)
        X.masked_fill_(X.abs() < math.exp(LEAST), 0)
        ctx.save_for_backward(X)
        return X

    @staticmethod
    def backward(ctx: Any, dX: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        return -(X.mT @ dX @ X.mT).tril(-1)


BLOCK = 16


def _diagonal(A: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal: [..., C, C] -> [..., C / size, size, size]."""
    squares = A.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return squares.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).clone()


LEAST = -35.0


def faded(log: Tensor) -> Tensor:
    """exp(log), and 0 below exp(LEAST) = 6e-16: a float64 sum would hardly keep it beside 1.

    Products of two such factors are then no subnormal numbers, with which a CPU takes four times as long.
    """
    return log.masked_fill(log < LEAST, -torch.inf).exp()


def decayed_products(lefts: Sequence[Tensor], right: Tensor, total: Tensor) -> list[Tensor]:
    """P_tj = Σ_c left_tc exp(G_tc - G_jc) right_jc for j <= t, 0 above: [..., C, C] per left.

    G - G could only be split into exp(G_t) exp(-G_j), which overflows. So blocks are halved: between two
    halves, exp(G_t - G_m) exp(G_m - G_j) has a middle m with both exponents <= 0. C is a power of two.
    """
    heads = total.shape[:-1]  # value heads may share a key, and differ in their decay
    out = [(left * right).sum(-1).expand(heads)[..., None, None] for left in lefts]  # [..., C, 1, 1]: j = t
    half, C = 1, right.shape[-2]
    while half < C:
        G, own = (x.unflatten(-2, (-1, 2, half)) for x in (total, right))  # [..., pairs, two halves, h, k]
        middle = G[..., 0, -1:, :]
        shrunk = own[..., 0, :, :] * faded(middle - G[..., 0, :, :])
        grown = faded(G[..., 1, :, :] - middle)
        for index, left in enumerate(lefts):
            below = (left.unflatten(-2, (-1, 2, half))[..., 1, :, :] * grown) @ shrunk.mT
            first, second = out[index].unflatten(-3, (-1, 2)).unbind(-3)
            above = torch.cat((first, torch.zeros_like(below)), -1)
            out[index] = torch.cat((above, torch.cat((below, second), -1)), -2)
        half *= 2
    return [block.squeeze(-3) for block in out]


Kind = Literal["delta", "channel", "additive"]
"""The recurrences by what they hold: the delta rule, with a decay per channel (KDA), no rule (SSD)."""
ROWS: dict[Kind, tuple[int, int, int]] = {"delta": (7, 7, 0), "channel": (7, 7, 25), "additive": (3, 6, 0)}
"""Float32 numbers per slot and value head at the peak of backward, in units of (k + v, C, k)."""


def workspace_bytes(G: int, H: int, k: int, v: int, device: str, kind: Kind) -> int:
    """Bytes that backward of a segment adds: float32 tensors of its slots, and ten states of each chunk.

    Queries and keys of the G key heads are held six times. tests/kernels/recurrence compares it with the
    bytes that are live.
    """
    of_widths, of_chunk, of_keys = ROWS[kind]
    of_slot = H * (of_widths * (k + v) + of_chunk * CHUNK + of_keys * k) + 6 * G * k
    return 4 * CHUNKS[device] * (CHUNK * of_slot + 10 * H * k * v)


def carried_bytes(H: int, k: int, v: int, device: str) -> int:
    """Bytes per token of the states that are carried between the segments of a long document, at most."""
    return -(-4 * H * k * v // (CHUNKS[device] * CHUNK))
