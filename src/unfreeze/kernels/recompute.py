"""Recomputation in backward: the part of an op in that of its layer, and functions that do it themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from unfreeze.kernels.loops.rows import slabs

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


WORK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Most bytes of the float32 tensors of a `recomputed` function, and of a short convolution, at once."""
COPIES = 10  # float32 copies of its widest input that such a function makes, with their gradients


def work_bytes(device: str) -> int:
    """WORK_BYTES of a device type."""
    return WORK_BYTES.get(device, WORK_BYTES["cuda"])


def recomputed(function: Callable[..., Tensor], *of_tokens: Tensor, shared: Sequence[Tensor] = ()) -> Tensor:
    """function(*of_tokens, *shared) for a function that treats each token, the first dimension, alone.

    Backward keeps the inputs only and computes the function again, some tokens at a time (`work_bytes`). For
    chains of elementwise operations and norms, of which autograd would keep a tensor each.
    """
    return _Recomputed.apply(function, len(of_tokens), *of_tokens, *shared)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], count: int, *inputs: Tensor) -> Tensor:
        ctx.function, ctx.count = function, count
        ctx.save_for_backward(*inputs)
        every, shared = inputs[:count], inputs[count:]
        some = list(_some(every))
        if len(some) == 1:
            return function(*inputs)
        first = function(*(x[some[0]] for x in every), *shared)
        out = first.new_empty(len(every[0]), *first.shape[1:])
        out[some[0]] = first
        for rows in some[1:]:
            out[rows] = function(*(x[rows] for x in every), *shared)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, inputs, count = ctx.needs_input_grad[2:], ctx.saved_tensors, ctx.count
        # gradients of what all tokens share are summed in float32 at least
        gradients = [
            None
            if not need
            else torch.empty_like(x, memory_format=torch.contiguous_format)
            if place < count
            else torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
            for place, (x, need) in enumerate(zip(inputs, needs, strict=True))
        ]
        for rows in _some(inputs[:count]):
            own = [
                (x[rows] if place < count else x).detach().requires_grad_(need)
                for place, (x, need) in enumerate(zip(inputs, needs, strict=True))
            ]
            with torch.enable_grad():
                y = ctx.function(*own)
            parts = iter(torch.autograd.grad(y, [x for x in own if x.requires_grad], dy[rows]))
            for place, gradient in enumerate(gradients):
                if gradient is not None and place < count:
                    gradient[rows] = next(parts)
                elif gradient is not None:
                    gradient += next(parts)
        return (
            None,
            None,
            *(
                None if gradient is None else gradient.to(x.dtype)
                for gradient, x in zip(gradients, inputs, strict=True)
            ),
        )


def _some(of_tokens: Sequence[Tensor]) -> Iterator[slice]:
    """Slices of tokens whose work fits in `work_bytes`."""
    widest = max(x[0].numel() for x in of_tokens) if len(of_tokens[0]) else 1
    return slabs(max(1, len(of_tokens[0])), 4 * COPIES * widest, work_bytes(of_tokens[0].device.type))
