"""How an op takes part in the recomputation of a layer (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Reuse(Protocol):
    """Keeps what an op computed in forward for when its layer is recomputed in backward.

    The op runs both times. In forward, without gradients, reuse(compute) returns compute() and keeps it. In
    the recomputation, with gradients, it returns what was kept and computes nothing. So compute() must return
    what the op saves for backward; the op's output is not needed then.
    """

    def __call__(self, compute: Callable[[], T], /) -> T: ...
