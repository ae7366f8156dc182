"""Typed wrappers for torch calls without types. Each does the same as torch's method of that name.

Strictly typed packages call these, so that casts are only here.
"""

# torch has no types for these, and no public name for a module's own tables
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from torch import Tensor, nn


def ints(tensor: Tensor) -> list[int]:
    """tolist() of a one-dimensional tensor of whole numbers."""
    return cast("list[int]", tensor.tolist())


def floats(tensor: Tensor) -> list[float]:
    """tolist() of a one-dimensional tensor of real numbers."""
    return cast("list[float]", tensor.tolist())


def flags(tensor: Tensor) -> list[bool]:
    """tolist() of a one-dimensional tensor of True and False."""
    return cast("list[bool]", tensor.tolist())


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Tensor that shares the array's memory."""
    import torch

    return torch.from_numpy(array)


def split(tensor: Tensor, sizes: int | Sequence[int]) -> tuple[Tensor, ...]:
    """Split into views of contiguous rows: one per size in `sizes`, or chunks of `sizes` rows."""
    return cast("tuple[Tensor, ...]", tensor.split(sizes))


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules())


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own table of parameters, without submodules. Changes to it change the module."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Like parameters_of, for buffers."""
    return module._buffers
