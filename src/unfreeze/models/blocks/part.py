"""The joint for weights of which only some rows train (models/only.py)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Part(Protocol):
    """Rows of a weight that train alone."""

    def joined(self, parameter: Tensor) -> Tensor:
        """The whole weight, with a gradient for the parameter, which is its trained rows."""
        ...
