"""What a layer's first visit leaves for its recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Memo:
    """What a layer's second visit takes from its first instead of computing it again, in the order in which the layer asks.

    `dear`: also what attention and the experts made, which costs the most to compute per byte kept. `products`: and every linear layer's output.
    `unread`: the second visit is for gradients only, nobody reads its result.
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
