"""Results that a layer's first visit saves for its recomputation in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Skip(Protocol):
    """`Saved.skip`: a result that the recomputation can do without."""

    def __call__(self, compute: Callable[[], T], /) -> T | None: ...


class Saved:
    """Results of the first visit, in the order in which the layer requests them.

    The second visit requests them in the same order.

    expensive  outputs of attention and experts are saved: they cost the most to compute per byte
    linear     outputs of linear layers are saved
    unread     the second visit is for gradients only; its output is not used
    """

    def __init__(self, *, expensive: bool = False, linear: bool = False, unread: bool = False):
        self.expensive, self.linear, self.unread = expensive, linear, unread
        self.second = False  # True during the second visit
        self.values: list[Any] = []

    def reuse(self, compute: Callable[[], T]) -> T:
        """Return compute() on the first visit, and that result again on the second."""
        if self.second:
            return self.values.pop(0)
        self.values.append(compute())
        return self.values[-1]

    def skip(self, compute: Callable[[], T]) -> T | None:
        """Return compute() on the first visit, None on the second."""
        return None if self.second else compute()
