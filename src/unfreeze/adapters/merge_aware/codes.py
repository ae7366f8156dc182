"""Ŵ in its format, kept while a model is only looked at (Decoder.looking).

Generation reads every weight at every step: rounded anew each time, a step of tiny-k2 would take ten times as
long. Passes of many rows compute Ŵ as they use it, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")
FEW = 64  # rows of a matrix; above, computing Ŵ takes less time than the products with it


class Kept(Generic[T]):
    """A value of one adapter, computed again if its factors have changed. None is kept when nobody looks."""

    def __init__(self) -> None:
        self.looking = 0
        self._value: tuple[tuple[object, ...], T] | None = None

    @property
    def wanted(self) -> bool:
        """True in a pass that is only looked at."""
        return self.looking > 0 and not torch.is_grad_enabled()

    def get(
        self, factors: Sequence[nn.Parameter | None], scales: Sequence[float], compute: Callable[[], T]
    ) -> T:
        """compute(), or its value for the same factors."""
        key = (*(None if factor is None else factor._version for factor in factors), *scales)
        if self._value is None or self._value[0] != key:
            self._value = None  # its memory is free before the next is computed
            self._value = key, compute()
        return self._value[1]

    @contextmanager
    def look(self) -> Iterator[None]:
        """Context in which the value is kept."""
        self.looking += 1
        try:
            yield
        finally:
            self.looking -= 1
            if not self.looking:
                self._value = None
