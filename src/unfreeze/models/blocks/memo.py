"""What a layer's first visit leaves for its recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Memo:
    """What the first visit of a layer keeps for its recomputation in backward, in the order in which the
    layer asks.

    dear      also keep the outputs of attention and experts: they cost the most to compute per byte kept
    products  also keep the output of every linear layer
    unread    the second visit is for gradients only; its output is not used
    """

    def __init__(self, dear: bool = False, products: bool = False, unread: bool = False):
        self.dear, self.products, self.unread, self.second, self.values = dear, products, unread, False, []

    def once(self, compute: Callable[[], Any]) -> Any:
        """compute() on the first visit; on the second what it gave then."""
        if self.second:
            return self.values.pop(0)
        self.values.append(compute())
        return self.values[-1]

    def first(self, compute: Callable[[], Any]) -> Any:
        """compute() on the first visit, None on the second."""
        return None if self.second else compute()
