"""Codec: what a quantized weight format must say about itself; Packed: one quantized weight in memory.

A format is one file beside this one. It knows which tensors on disk make one weight, how they are laid out in memory,
and how to go to floating point and back.

Shapes: out, in = a matrix y = x Wᵀ with W [out, in]; parts may carry leading dims (E experts), the matrix is the last two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """One quantized format with its parameters (for int4: the group size). Implementations are frozen dataclasses."""

    @property
    def name(self) -> str:
        """The format's published name, e.g. "int4-pack-quantized"."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The last name parts of the tensors on disk that make one weight, e.g. ("weight_packed", "weight_scale", "weight_shape")."""
        ...

    def parts(self, out_features: int, in_features: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """suffix -> (dtype, shape) of the parts kept in memory for one [out, in] matrix. ConfigError where the format cannot hold it."""
        ...

    def scaled_in(self, dtype: torch.dtype) -> Codec:
        """The same format with its scales held in `dtype`, that of the files."""
        ...

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, Tensor]:
        """suffix -> tensor for what stands on disk beside `parts` (weight_shape); known from the shape, so not kept in memory."""
        ...

    def shape(self, parts: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Shape [..., out, in] of the weight that `parts` make."""
        ...

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight [..., out, in] in the dtype of its scales. Leading dims allowed; expands everything it is given."""
        ...

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """suffix -> part for a floating point weight [..., out, in]; keys as in `parts`."""
        ...

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Bytes of the parts of one [out, in] matrix in memory."""
        ...


@dataclass(frozen=True, eq=False)
class Packed:
    """A quantized weight [..., out, in] in memory: its codec and its parts (suffix -> tensor). Never expanded unless asked."""

    codec: Codec
    parts: Mapping[str, Tensor]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.codec.shape(self.parts))

    @property
    def nbytes(self) -> int:
        """Bytes of the parts as they are held."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    def dequantize(self) -> Tensor:
        """All of it, in floating point: 2 bytes per weight in bf16. Index first (`packed[expert].dequantize()`) to expand one matrix."""
        return self.codec.dequantize(self.parts)

    def __getitem__(self, index: int | slice) -> Packed:
        """The same weight restricted along its first leading dim (one expert, or some): views, nothing is copied."""
        return Packed(self.codec, {suffix: part[index] for suffix, part in self.parts.items()})


def parts_nbytes(parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    """Bytes of the parts a codec describes: Σ prod(shape) * itemsize."""
    return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in parts.values())
