"""The scan of states in plain torch: the oracle; it runs if no faster candidate does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from unfreeze.kernels.state_scan import Steps


def forward(
    u: Tensor, w: Tensor | None, k: Tensor, a: Tensor, state: Tensor, steps: Steps
) -> tuple[Tensor, Tensor, Tensor]:
    """(the state before each chunk, U, the state behind each document); the formula of __init__.py."""
    before = u.new_empty(len(u), *state.shape[1:])
    after, own, S, begin = torch.empty_like(state), u if w is None else torch.empty_like(u), state, 0
    for count, following in zip(steps.counts, (*steps.counts[1:], 0), strict=True):
        rows = slice(begin, begin + count)
        before[rows] = S
        if w is not None:
            torch.sub(u[rows], w[rows] @ S, out=own[rows])
        S = a[rows] * S + k[rows].mT @ own[rows]
        after[following:count] = S[following:]
        S, begin = S[:following], begin + count
    return before, own, after


def backward(
    dbefore: Tensor, du: Tensor, dafter: Tensor, w: Tensor | None, k: Tensor, a: Tensor, steps: Steps
) -> tuple[Tensor, Tensor, Tensor]:
    """(G = dU + K D, D = the gradient of the state behind each chunk, that of the first states).

    dafter is that of the states behind the documents.
    """
    g, d = torch.empty_like(du), torch.empty_like(dbefore)
    D, end = dafter[:0], len(du)
    for count in reversed(steps.counts):
        D = torch.cat((D, dafter[len(D) : count]))
        rows, end = slice(end - count, end), end - count
        d[rows] = D
        torch.add(du[rows], k[rows] @ D, out=g[rows])
        D = a[rows] * D + dbefore[rows]
        if w is not None:
            D -= w[rows].mT @ g[rows]
    return g, d, D
