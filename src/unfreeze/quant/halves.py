"""Halves: gate and up of a stack of experts, if their parts cannot be concatenated by rows.

A stack of experts holds gate and up as one matrix [2I, D]: gate's rows, then up's. In most formats the parts
concatenate the same way, since codes and scales belong to single rows. They do not if a format puts the input
dimension first (AWQ, GPTQ), has one number per matrix (NVFP4, one scale per tensor), blocks of a flat matrix
(bitsandbytes), or blocks that do not divide I (FP8 of 128 rows with I = 192). Then each half keeps its own
parts, "gate_<suffix>" and "up_<suffix>", and the two are concatenated when they are expanded.

The keymap knows these names (checkpoint/keymap.py), so a family's rules stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from unfreeze.quant.codec import Codec, Part

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
HALVES = ("gate_", "up_")
"""Prefix of a part's suffix, for half 0 and half 1 of a StackRule."""


@dataclass(frozen=True)
class Halves:
    """Two matrices of `codec`, one below the other, as one: quant/codec.py documents each method.

    `parts` and `nbytes` take out_features of both together.
    """

    codec: Codec

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def suffixes(self) -> tuple[str, ...]:
        return tuple(half + suffix for half in HALVES for suffix in self.codec.suffixes)

    @property
    def variants(self) -> str:
        return self.codec.variants

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        one = self.codec.parts(out_features // 2, in_features)
        return {half + suffix: part for half in HALVES for suffix, part in one.items()}

    def as_stored(self, dtypes: Mapping[str, str]) -> Halves:
        return Halves(self.codec.as_stored(dtypes))

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """The extras of each half. They are found and compared by the names of the matrices on disk."""
        one = self.codec.disk_extras(out_features // 2, in_features)
        return {half + suffix: values for half in HALVES for suffix, values in one.items()}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        *leading, out_features, in_features = self.codec.shape(_of(HALVES[0], parts))
        return (*leading, 2 * out_features, in_features)

    def each(self, parts: Mapping[str, T]) -> Iterator[tuple[Codec, dict[str, T]]]:
        """(codec, parts) of the two matrices."""
        for half in HALVES:
            yield self.codec, _of(half, parts)

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        import torch

        return torch.cat([self.codec.dequantize(_of(half, parts)) for half in HALVES], dim=-2)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        pairs = zip(HALVES, weight.chunk(2, dim=-2), strict=True)
        return {
            half + suffix: part for half, one in pairs for suffix, part in self.codec.quantize(one).items()
        }

    def nbytes(self, out_features: int, in_features: int) -> int:
        return 2 * self.codec.nbytes(out_features // 2, in_features)


@lru_cache(maxsize=256)
def stacked(codec: Codec, out_features: int, in_features: int) -> Codec:
    """The codec of two matrices [out / 2, in], one below the other: `codec`, or Halves of it.

    `codec` itself if the concatenated parts of both are the parts of the stack, which the shapes show.
    """
    both, one = codec.parts(out_features, in_features), codec.parts(out_features // 2, in_features)
    below = all(
        shape and one[suffix][1] and shape == (2 * one[suffix][1][0], *one[suffix][1][1:])
        for suffix, (_, shape) in both.items()
    )
    return codec if below else Halves(codec)


def _of(half: str, parts: Mapping[str, T]) -> dict[str, T]:
    return {suffix.removeprefix(half): part for suffix, part in parts.items() if suffix.startswith(half)}
