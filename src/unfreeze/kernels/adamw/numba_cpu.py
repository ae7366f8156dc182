"""AdamW on CPU: one launch over all tensors, each number read and written once.

With a half precision weight: 14 bytes read and 14 written per parameter. torch's fused step with the passes
around it (gradient to float32, clipping, copy to bf16) reads and writes 48 in all. Tensors are passed as
addresses, so 300 small adapters cost one call of a compiled function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from unfreeze.kernels.adamw.rule import AdamWRule, AdamWUpdate, numbers_of, refuse_unread
from unfreeze.kernels.loops.numba_options import ONE, Kernel, narrow, widen

carray: Any = numba.carray  # type: ignore[attr-defined]
CHUNK = 1 << 16  # numbers that one thread processes at a time
# within a chunk: three short loops over data in the L1 cache. LLVM does not vectorise one loop over five
# arrays (too many may overlap)
PIECE = 1024
BF16 = np.uint16(0)  # selects the type that `narrow` rounds to


def _to_pointer(typingctx: Any, address: Any) -> Any:
    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), code


_pointer: Any = intrinsic(_to_pointer)


@numba.njit(inline="always")
def _moments(gradient, m, v, scale, keep1, keep2):
    for i in range(m.size):
        g = np.float32(widen(gradient[i]) * scale)
        m[i] = np.float32(m[i] + np.float32(np.float32(g - m[i]) * np.float32(ONE - keep1)))
        v[i] = np.float32(np.float32(v[i] * keep2) + np.float32(np.float32(g * g) * np.float32(ONE - keep2)))


@numba.njit(inline="always")
def _move(w, m, v, shrink, size, root, eps):
    for i in range(w.size):
        w[i] = np.float32(
            np.float32(w[i] * shrink)
            - np.float32(np.float32(size * m[i]) / np.float32(np.float32(np.sqrt(v[i])) / root + eps))
        )


@numba.njit(inline="always")
def _round(w, out):
    for i in range(w.size):
        out[i] = narrow(w[i], BF16)


@Kernel
def _step(start, stop, chunks, addresses, halves, numbers, keep1, keep2, eps, scale):
    """One update of all tensors, a chunk at a time.

    chunks [C, 3]: tensor, first, count. addresses [n, 5]: master, m, v, gradient, weight (0: none). halves
    [n]: True for a bf16 gradient. numbers [n, 3]: 1 - lr · decay, lr / (1 - b1^t), sqrt(1 - b2^t).
    """
    for c in range(start, stop):
        tensor, first, count = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        end = first + count
        w = carray(_pointer(addresses[tensor, 0]), end, np.float32)
        m = carray(_pointer(addresses[tensor, 1]), end, np.float32)
        v = carray(_pointer(addresses[tensor, 2]), end, np.float32)
        for at in range(first, end, PIECE):
            till = min(at + PIECE, end)
            if halves[tensor]:
                half = carray(_pointer(addresses[tensor, 3]), end, np.uint16)
                _moments(half[at:till], m[at:till], v[at:till], scale, keep1, keep2)
            else:
                full = carray(_pointer(addresses[tensor, 3]), end, np.float32)
                _moments(full[at:till], m[at:till], v[at:till], scale, keep1, keep2)
            _move(
                w[at:till],
                m[at:till],
                v[at:till],
                numbers[tensor, 0],
                numbers[tensor, 1],
                numbers[tensor, 2],
                eps,
            )
            if addresses[tensor, 4] != 0:
                out = carray(_pointer(addresses[tensor, 4]), end, np.uint16)
                _round(w[at:till], out[at:till])


@torch.no_grad()
def step(updates: Sequence[AdamWUpdate], rule: AdamWRule) -> list[Tensor]:
    """As kernels.adamw.adamw, for float32 masters and gradients and weights in float32 or bf16."""
    refuse_unread(updates, (torch.float32, torch.bfloat16))
    chunks: list[tuple[int, int, int]] = []
    addresses, halves, numbers, held = [], [], [], []
    for index, u in enumerate(updates):
        gradient = u.gradient.contiguous()
        held.append(gradient)  # a copy must live until the launch
        weight = 0 if u.weight is None else u.weight.data_ptr()
        addresses.append(
            (u.master.data_ptr(), u.exp_avg.data_ptr(), u.exp_avg_sq.data_ptr(), gradient.data_ptr(), weight)
        )
        halves.append(gradient.dtype == torch.bfloat16)
        numbers.append(numbers_of(u, rule))
        size = u.master.numel()
        chunks += [(index, first, min(CHUNK, size - first)) for first in range(0, size, CHUNK)]
    if chunks:
        _step(
            sum(u.master.numel() for u in updates),
            len(chunks),
            np.array(chunks, np.int64),
            np.array(addresses, np.int64),
            np.array(halves, np.bool_),
            np.array(numbers, np.float32),
            np.float32(rule.betas[0]),
            np.float32(rule.betas[1]),
            np.float32(rule.eps),
            np.float32(rule.gradient_scale),
        )
    for u in updates:
        for tensor in (u.master, u.exp_avg, u.exp_avg_sq, *([] if u.weight is None else [u.weight])):
            torch.autograd.graph.increment_version(tensor)  # as torch's in-place operations do
    return [x for u in updates for x in (u.master, u.exp_avg, u.exp_avg_sq)]
