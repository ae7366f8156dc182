"""Recomputation in backward: the part of an op in that of its layer, and functions that do it themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Reuse(Protocol):
    """Keeps an op's forward results for the recomputation of its layer in backward.

    The op runs both times. In forward, without gradients, reuse(compute) returns compute() and keeps it. In
    the recomputation, with gradients, it returns the kept results and computes nothing. So compute() must
    return what the op saves for backward; the op's output is not needed then.
    """

    def __call__(self, compute: Callable[[], T], /) -> T: ...


def compute_now(compute: Callable[[], T]) -> T:
    """The `Reuse` of a layer that is not recomputed."""
    return compute()


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """function(*inputs); backward keeps the inputs only and computes the function again.

    For chains of elementwise operations, of which autograd would keep a tensor each.
    """
    return _Recomputed.apply(function, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        own = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad():
            y = ctx.function(*own)
        gradients = iter(torch.autograd.grad(y, [x for x in own if x.requires_grad], dy))
        return None, *(next(gradients) if need else None for need in needs)
