"""Rows: which rows of dimension 0 are meant, of how many; and those held here of a divided parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Rows first:last of a tensor that has `of` rows in dimension 0."""

    first: int
    last: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last <= self.of:
            raise ValueError(f"rows {self.first}:{self.last} of {self.of}")

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def slice(self) -> slice:
        return slice(self.first, self.last)


def share(of: int, index: int, parts: int) -> Rows:
    """Part `index` of `parts` neighbouring parts of `of` rows; their sizes differ by one at most."""
    return Rows(index * of // parts, (index + 1) * of // parts, of)


def here(parameter: Tensor) -> Tensor:
    """The rows held here of a parameter that FSDP2 divides, in its own memory; another one itself."""
    divided: Any = parameter
    return divided.detach().to_local() if hasattr(divided, "to_local") else parameter


def gathered(parameter: Tensor) -> Tensor:
    """A parameter that FSDP2 divides, gathered: all processes call it together; another one itself."""
    divided: Any = parameter
    return divided.detach().full_tensor() if hasattr(divided, "full_tensor") else parameter
