"""Calls that torch leaves without types, with them. Each does what torch's method of that name does.

Strictly typed rooms call these, so that an unknown type becomes a known one here and nowhere else.
"""

# torch leaves these without types, and has no public name for a module's own tables
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from torch import Tensor, nn


def ints(tensor: Tensor) -> list[int]:
    """tolist() of one dimension of whole numbers."""
    return cast("list[int]", tensor.tolist())


def floats(tensor: Tensor) -> list[float]:
    """tolist() of one dimension of real numbers."""
    return cast("list[float]", tensor.tolist())


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor in the array's memory."""
    import torch

    return torch.from_numpy(array)


def split(tensor: Tensor, sizes: int | Sequence[int]) -> tuple[Tensor, ...]:
    """Views of neighbouring rows: as many as `sizes` says, or so many of each."""
    return cast("tuple[Tensor, ...]", tensor.split(sizes))


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules())


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own table of parameters, without those of modules in it; what is set here is set there."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The same of buffers."""
    return module._buffers
