"""The part that an op plays in recomputing its layer (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

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
