"""Rows: which rows of a tensor's dimension 0 are meant, of how many."""

from __future__ import annotations

from dataclasses import dataclass


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
