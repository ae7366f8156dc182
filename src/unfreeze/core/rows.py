"""Rows: a range of dimension 0. Also local shards and full tensors of FSDP2 parameters."""

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
    """Part `index` of `parts` contiguous parts of `of` rows; sizes differ by at most one."""
    return Rows(index * of // parts, (index + 1) * of // parts, of)


def here(parameter: Tensor) -> Tensor:
    """Local shard of a parameter that FSDP2 shards, sharing its memory; any other parameter itself."""
    divided: Any = parameter
    return divided.detach().to_local() if hasattr(divided, "to_local") else parameter


def gathered(parameter: Tensor) -> Tensor:
    """All-gather a parameter that FSDP2 shards (collective); any other parameter is returned itself."""
    divided: Any = parameter
    return divided.detach().full_tensor() if hasattr(divided, "full_tensor") else parameter
