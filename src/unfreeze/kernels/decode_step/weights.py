"""Matrices as the operations of a step read them: which products (tiles.py), which addresses, per format.

O outputs, K inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unfreeze.core import cpu
from unfreeze.kernels.decode_step import tiles
from unfreeze.kernels.decode_step.codes import CHUNK
from unfreeze.kernels.decode_step.dots import BF16, FLOAT32
from unfreeze.kernels.decode_step.located import PART, located
from unfreeze.kernels.decode_step.lookup import int4_values, mxfp4_values, powers
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.halves import Halves
from unfreeze.quant.int4 import Int4
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.mxfp8 import Mxfp8
from unfreeze.quant.nvfp4 import Nvfp4

DENSE = {torch.float32: (FLOAT32, tiles.float32), torch.bfloat16: (BF16, tiles.bf16)}
ONE_SCALE = 40  # chunks of a scale as a power of two: more than any row has
ROUNDS = {torch.float32: "", torch.float8_e8m0fnu: "", torch.bfloat16: " bf16", torch.float16: " f16"}
"""Dtype of the scales -> what it adds to the name of a kind. Powers of two change no digit of a code."""


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


def packed_weight(weight: Packed, pairs: bool) -> Weight:
    """Codes, read in place. Raises CannotRecord for a format, or sizes of it, that no products read."""
    parts = {name: part if len(weight.shape) == 3 else part[None] for name, part in weight.parts.items()}
    if any(part.device.type != "cpu" or not part.is_contiguous() for part in parts.values()):
        raise CannotRecord(f"{weight.codec.name} that is not contiguous on a CPU")
    codec = weight.codec.codec if isinstance(weight.codec, Halves) else weight.codec
    each = [parts for _, parts in weight.codec.each(parts)] if isinstance(weight.codec, Halves) else [parts]
    read = FORMATS.get(type(codec))
    if read is None:
        raise CannotRecord(codec.name)
    return read(codec, each, pairs)


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


def _described(kind: str, rows: int, group: int, parts: Sequence[Located], pairs: bool) -> Weight:
    """The weight as located.py finds it. group: chunks of a scale as a power of two."""
    if pairs:
        kind = kind.removesuffix(" bf16")  # its weights are rounded to bf16 in any case
    if kind.endswith(" f16") and not cpu.loops_have("cpu-avx2"):
        raise CannotRecord("float16 without its instructions")
    head = [tiles.tile(kind).address(pairs), rows, len(parts), group]
    numbers = np.array(head + [number for part in parts for number in part.numbers] + [0] * PART, np.int64)
    return Weight(located.address(pairs), -1, 0, 1, table=numbers.ctypes.data, holds=(numbers, parts))


def _power(columns: int, width: int, what: str) -> int:
    """Chunks of a scale for `columns` columns, as a power of two. Raises CannotRecord."""
    chunks, rest = divmod(columns, CHUNK)
    if columns >= width:
        return ONE_SCALE
    if rest or chunks & (chunks - 1):
        raise CannotRecord(f"{what} in groups of {columns}")
    return chunks.bit_length() - 1


Parts = dict[str, Tensor]


def _int4(codec: Int4, parts: Sequence[Parts], pairs: bool) -> Weight:
    codes, scales = (parts[0][suffix] for suffix in codec.suffixes[:2])
    (_, O, groups), K = scales.shape, scales.shape[-1] * codec.group_size
    if scales.dtype != torch.bfloat16 or K % CHUNK:
        raise CannotRecord(codec.name)
    values, group = torch.from_numpy(int4_values(pairs)).flatten(), _power(codec.group_size, K, codec.name)
    if len(parts) > 1:
        each = [Located(one["weight_packed"], one["weight_scale"], table=values) for one in parts]
        return _described("int4", O, group, each, pairs)
    # no row has to be found: all of the stack lie behind each other
    return Weight(
        tiles.int4.address(pairs),
        -1,
        codes.data_ptr(),
        K // 2,
        scales.data_ptr(),
        2 * groups,
        values.data_ptr(),
        group,
        holds=(codes, scales, values),
    )


def _fp8(codec: Fp8 | Fp8Scaled, parts: Sequence[Parts], pairs: bool) -> Weight:
    each, rounds = [], ""
    E, O, K = parts[0]["weight"].shape
    rows, columns = codec.block if isinstance(codec, Fp8) else (1 if "out" in codec.scales else O, K)
    for one in parts:
        scales = one[codec.scale]
        rounds = ROUNDS[scales.dtype]
        # a scale per 16,384 weights, or per row: a copy costs nothing
        wide = _moved(scales.float()).reshape(E, -(-O // rows), -1)
        each.append(Located(one["weight"], wide, rows))
    return _described(f"fp8{rounds}", O, _power(columns, K, codec.name), each, pairs)


def _moved(scales: Tensor) -> Tensor:
    """The scales of e4m3 as codes.py takes them. Raises CannotRecord if they leave the range of float32."""
    moved = scales * 2.0**120
    if bool(scales.isfinite().logical_and(moved.isinf()).any()):
        raise CannotRecord("FP8 with scales of 256 and more")
    return moved


def _mxfp8(codec: Mxfp8, parts: Sequence[Parts], pairs: bool) -> Weight:
    O = parts[0]["weight"].shape[1]
    for one in parts:
        _moved(powers()[int(one["weight_scale"].view(torch.uint8).amax())])
    table = powers() * 2.0**120
    each = [Located(one["weight"], one["weight_scale"], table=table) for one in parts]
    return _described("mxfp8", O, 0, each, pairs)


def _mxfp4(codec: Mxfp4, parts: Sequence[Parts], pairs: bool) -> Weight:
    codes, scales = codec.suffixes
    O = parts[0][codes].shape[1]
    each = [Located(one[codes], one[scales], table=mxfp4_values(pairs)) for one in parts]
    return _described("mxfp4", O, 0, each, pairs)


def _nvfp4(codec: Nvfp4, parts: Sequence[Parts], pairs: bool) -> Weight:
    codes, scales, whole = codec.suffixes
    E, O, _ = parts[0][codes].shape
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    each = [
        Located(one[codes], one[scales], table=codec.effective(every, one[whole].reshape(E, 1)))
        for one in parts
    ]
    return _described("nvfp4 bf16" if codec.names.divides else "nvfp4", O, 0, each, pairs)


FORMATS: dict[type, Callable[[Any, Sequence[Parts], bool], Weight]] = {
    Int4: _int4,
    Fp8: _fp8,
    Fp8Scaled: _fp8,
    Mxfp8: _mxfp8,
    Mxfp4: _mxfp4,
    Nvfp4: _nvfp4,
}
