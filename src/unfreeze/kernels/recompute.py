"""How an op takes part in the recomputation of a layer (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Reuse(Protocol):
    """A layer that is recomputed goes through an op twice.

    First in forward, without gradients: reuse(compute) returns compute() and keeps it. Again in backward,
    with gradients: it returns what was kept and computes nothing. What compute() returns is therefore what
    the op saves for backward; its output is not needed then.
    """

    def __call__(self, compute: Callable[[], T], /) -> T: ...
