"""Matrices as the operations of a step read them: addresses of their products, and of what these read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unfreeze.core import cpu
from unfreeze.kernels.decode_step import affine, tiles
from unfreeze.kernels.decode_step.dots import BF16, FLOAT32
from unfreeze.kernels.decode_step.located import PART, located

DENSE = {torch.float32: (FLOAT32, tiles.float32), torch.bfloat16: (BF16, tiles.bf16)}


class CannotRecord(Exception):
    """This part has no operation here: it runs as it does in training."""


@dataclass
class Weight:
    """A matrix, or a stack of them, as the operations read it; `holds` keeps its memory alive.

    tile: address of its products; kind: FLOAT32, BF16, or -1 for a packed one.
    """

    tile: int
    kind: int
    codes: int
    stride: int
    scales: int = 0
    scale_stride: int = 0
    table: int = 0
    group: int = 0
    holds: Any = None

    @property
    def arguments(self) -> list[int]:
        return [self.tile, self.codes, self.stride, self.scales, self.scale_stride, self.table, self.group]


def dense_weight(weight: Tensor, pairs: bool) -> Weight:
    if weight.dtype not in DENSE or not weight.is_contiguous() or weight.device.type != "cpu":
        raise CannotRecord(f"a weight of {weight.dtype}")
    kind, tile = DENSE[weight.dtype]
    stride = weight.shape[-1] * weight.element_size()
    # detached: a parameter can be given other memory (`data`), and this must stay
    return Weight(tile.address(pairs), kind, weight.data_ptr(), stride, holds=weight.detach())


@dataclass
class Located:
    """One part of a stack for located.py: views of memory, [E, rows, bytes] and [E, rows of scales, …]."""

    codes: Tensor
    scales: Tensor
    block: int = 1  # rows of the matrix that share a row of scales
    table: Tensor | None = None  # one for all, or [E, …]

    @property
    def numbers(self) -> list[int]:
        table = self.table
        return [
            *_strides(self.codes),
            *_strides(self.scales),
            self.block,
            0 if table is None else table.data_ptr(),
            0 if table is None or table.dim() == 1 else table.stride(0) * table.element_size(),
        ]


def _strides(tensor: Tensor) -> list[int]:
    """Address, bytes to the next matrix, and to the next row; 0 for a dimension of size 1."""
    size = tensor.element_size()
    steps = (tensor.stride(i) * size if tensor.shape[i] > 1 else 0 for i in (0, 1))
    return [tensor.data_ptr(), *steps]


def _tile(kind: str, pairs: bool) -> int:
    """Address of the products of that kind. Raises CannotRecord without the instructions it needs."""
    if pairs:
        kind = kind.removesuffix(" bf16")  # its weights are rounded to bf16 in any case
    if kind.endswith(" f16") and not cpu.loops_have("cpu-avx2"):
        raise CannotRecord("float16 without its instructions")
    return tiles.tile(kind).address(pairs)


def located_weight(kind: str, rows: int, group: int, parts: Sequence[Located], pairs: bool) -> Weight:
    """The weight as located.py finds it. group: chunks of a scale as a power of two."""
    head = [_tile(kind, pairs), rows, len(parts), group]
    numbers = np.array(head + [number for part in parts for number in part.numbers] + [0] * PART, np.int64)
    return Weight(located.address(pairs), -1, 0, 1, table=numbers.ctypes.data, holds=(numbers, parts))


@dataclass
class Gathered:
    """One part of a stack for affine.py. [E, …] each; strides are those of one matrix.

    codes as they lie; scales [E, O, G] and zeros [E, words of rows, G], any strides; numbers [16] or [E, 16]
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    numbers: Tensor | None = None
    order: Tensor | None = None

    @property
    def addresses(self) -> list[int]:
        numbers = _strides(self.codes)
        for tensor in (self.scales, self.zeros):
            numbers += [0] * 4 if tensor is None else [*_strides(tensor), _step(tensor, 2)]
        for tensor in (self.numbers, self.order):
            if tensor is None:
                numbers += [0, 0]
            else:
                numbers += [tensor.data_ptr(), 0 if tensor.dim() == 1 else _step(tensor, 0)]
        return numbers


@dataclass
class Blocks(Gathered):
    """The same of bitsandbytes: scales [E, 1, blocks], zeros the scales of these, order their offset.

    codes_of_scales [E, 256]: what their codes stand for.
    """

    codes_of_scales: Tensor | None = None

    @property
    def addresses(self) -> list[int]:
        numbers, wide = super().addresses, self.codes_of_scales
        if wide is not None:
            numbers[9:11] = [wide.data_ptr(), _step(wide, 0)]
        return numbers


def _step(tensor: Tensor, dim: int) -> int:
    """Bytes between neighbours in a dimension; 0 for one of size 1."""
    return tensor.stride(dim) * tensor.element_size() if tensor.shape[dim] > 1 else 0


@dataclass
class Affine:
    """The HEAD of affine.py's description, without what follows from the parts."""

    kind: str
    rows: int
    group: int
    layout: int
    bits: int
    groups: int
    zero_bits: int = 0
    zero: int = 0
    one: int = 0
    wide: Tensor | None = None
    scale_size: int = 4

    def weight(self, parts: Sequence[Gathered], pairs: bool) -> Weight:
        address = _tile(self.kind, pairs)
        wide = 0 if self.wide is None else self.wide.data_ptr()
        numbers = [address, self.rows, len(parts), self.group, self.layout, self.bits, self.groups]
        numbers += [self.scale_size, wide, self.zero_bits, self.zero, self.one]
        for part in parts:
            numbers += part.addresses
        description = np.array(numbers + [0] * affine.PART, np.int64)
        return Weight(
            affine.affine.address(pairs),
            -1,
            0,
            1,
            table=description.ctypes.data,
            holds=(description, parts, self),
        )
