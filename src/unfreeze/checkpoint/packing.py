"""PackedFrom: a float matrix on disk is packed while it is loaded, one matrix at a time.

A release in bf16 that does not fit is trained in 4 bits: its manifest then lists the parts of packed weights
instead of the matrices (compress/quantize/onload.py), each with the matrix that it is made from. So a model,
a plan and a placement treat it as a release that was quantized before. Only reading differs, and is here:

    read the matrix [out, in] into memory    its bytes on disk
    round some rows at a time                float32, and what rounding takes
    copy the parts into the parameters       then the next matrix

Peak memory is the packed model and one matrix. Without rows that can be rounded apart (NVFP4, NF4) all of its
rows are rounded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unfreeze.checkpoint.tensors import TORCH_DTYPE, stored_tensor
from unfreeze.core.dtypes import ITEMSIZE
from unfreeze.core.errors import CheckpointError
from unfreeze.quant.codec import Codec, texted
from unfreeze.quant.requantize import below, rows_at_once

if TYPE_CHECKING:
    from unfreeze.checkpoint.manifest import Manifest, TensorInfo
    from unfreeze.checkpoint.resolve import Placement

COPIES = 9  # float32 copies of the rows that are rounded at a time, at most; NF4 has 8.0 of them, measured

Round = Callable[[Tensor, Codec, str], dict[str, Tensor]]
"""(W float32 [out, in], codec, its module's name on disk) -> suffix -> part."""
Read = Callable[["TensorInfo"], Tensor]
"""A tensor on disk -> its bytes, uint8 [n]."""


@dataclass(frozen=True, slots=True)
class PackedFrom:
    """A part of a packed weight, and the matrix on disk that it is made from.

    source      one matrix: a tensor, or an expert's slice of a stack; or a stack [E, …] of which the part is
                stacked too
    suffix      the part, as on disk
    module      its module on disk, for `round`
    transposed  the matrix on disk is [in, out]
    rows        (first, stop, step) of the matrix's rows; None: all. Gate's or up's of a fused matrix
    """

    source: TensorInfo
    codec: Codec
    suffix: str
    module: str
    round: Round
    transposed: bool = False
    rows: tuple[int, int, int] | None = None

    @property
    def experts(self) -> int | None:
        """Matrices of a stack; None: not a stack."""
        return self.source.shape[0] if len(self.source.shape) == 3 else None

    @property
    def matrices(self) -> list[TensorInfo]:
        """The source's matrices."""
        count = self.experts
        return [self.source] if count is None else [matrix_of(self.source, e) for e in range(count)]

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of one weight."""
        rows, columns = self.source.shape[-2:][:: -1 if self.transposed else 1]
        return (rows if self.rows is None else len(range(*self.rows))), columns

    def of_experts(self, first: int, last: int) -> PackedFrom:
        """The same for experts first:last of a stack."""
        start, size = matrix_of(self.source, first), last - first
        shape, nbytes = (size, *self.source.shape[1:]), size * start.nbytes
        return replace(self, source=replace(self.source, shape=shape, nbytes=nbytes, offset=start.offset))

    def parts(self, raw: Tensor, expert: int = 0) -> dict[str, Tensor]:
        """Every part of the weight, from the bytes of one matrix."""
        module = self.module if self.experts is None else f"{self.module}[{expert}]"
        stored = raw.view(TORCH_DTYPE[self.source.dtype]).view(self.source.shape[-2:])
        matrix = stored.t() if self.transposed else stored
        if self.rows is not None:
            matrix = matrix[slice(*self.rows)]
        step = rows_at_once(self.codec, *matrix.shape)
        if step >= len(matrix):
            return self._rounded(matrix, module)
        blocks = [
            self._rounded(matrix[first : first + step], module) for first in range(0, len(matrix), step)
        ]
        return {suffix: below([block[suffix] for block in blocks]) for suffix in blocks[0]}

    def _rounded(self, rows: Tensor, module: str) -> dict[str, Tensor]:
        try:
            return self.round(rows.float().contiguous(), self.codec, module)
        except CheckpointError as error:
            raise CheckpointError(
                f"{module}: {error.message}", next=error.next or "get the checkpoint again"
            ) from None


@dataclass(frozen=True)
class OnLoad:
    """The packing of a manifest while it is loaded. released: the manifest of the files as they are.

    format, modules: as in `unfreeze quantize MODEL --to FORMAT --modules MODULES`.
    """

    released: Manifest
    format: str
    modules: tuple[str, ...]

    @property
    def words(self) -> str:
        """Words such as 'INT4'."""
        return self.format.upper()

    @property
    def command(self) -> str:
        """The command that writes the packed release."""
        return f"unfreeze quantize {self.released.path} --to {self.format} --modules {' '.join(self.modules)}"


def packing_bytes(manifest: Manifest) -> int:
    """Most bytes that packing holds beside the model: a matrix as it is on disk, and its rows in float32."""
    most = 0
    for info in manifest.tensors.values():
        if (packing := info.packed_from) is not None:
            rows, columns = packing.shape
            step = min(rows, rows_at_once(packing.codec, rows, columns))
            most = max(most, packing.matrices[0].nbytes + COPIES * 4 * step * columns)
    return most


def bytes_read(placement: Placement) -> int:
    """Bytes that are read for a placement: a matrix's count for the first part of its weight."""
    packing = placement.info.packed_from
    if packing is None:
        return placement.info.nbytes
    first = packing.suffix == packing.codec.suffixes[0] and not (packing.rows and packing.rows[0])
    return packing.source.nbytes if first else 0


def by_source(placements: Iterable[Placement]) -> list[list[Placement]]:
    """The placements that are packed, by the matrix they are made from, in file order."""
    groups: dict[tuple[Path, int], list[Placement]] = {}
    for placement in placements:
        source = _packing(placement).source
        groups.setdefault((source.file, source.offset), []).append(placement)
    return [groups[place] for place in sorted(groups)]


def fill(placements: Sequence[Placement], flat: Mapping[str, Tensor], read: Read) -> Iterator[int]:
    """Pack each matrix into the parameters. flat: name -> the parameter as [n]. Yield the bytes of each.

    A matrix is rounded on the CPU, wherever its parameters are: its bits are those that `unfreeze quantize`
    writes. Raises CheckpointError for one that is not finite.
    """
    for group in by_source(placements):
        modules: dict[str, list[Placement]] = {}
        for placement in group:
            modules.setdefault(_packing(placement).module, []).append(placement)
        for expert, matrix in enumerate(_packing(group[0]).matrices):
            raw = read(matrix)
            for own in modules.values():
                parts = _packing(own[0]).parts(raw, expert)
                for placement in own:
                    part = parts[_packing(placement).suffix].reshape(-1)
                    start = placement.start + expert * len(part)
                    flat[placement.param][start : start + len(part)].copy_(part)
                del parts
            del raw
            yield matrix.nbytes


@lru_cache(maxsize=1)
def _made(whole: PackedFrom, expert: int) -> dict[str, Tensor]:
    """The parts of one matrix as on disk. The last one is kept: its parts are requested one after another."""
    raw = stored_tensor(whole.matrices[expert]).contiguous().view(-1).view(torch.uint8)
    parts = whole.parts(raw, expert)
    return whole.codec.stored_tensors(parts) if texted(whole.codec) else parts


def made(info: TensorInfo) -> Tensor:
    """One tensor that is not on disk: a part of a packed weight, or one of its extras."""
    packing = info.packed_from
    assert packing is not None
    codec, suffix = packing.codec, packing.suffix
    extras = codec.disk_extras(*packing.shape)
    if suffix in extras:
        return torch.tensor(extras[suffix], dtype=TORCH_DTYPE[info.dtype]).view(info.shape)
    whole = replace(packing, suffix="")
    of_each = [_made(whole, expert)[suffix] for expert in range(packing.experts or 1)]
    return (of_each[0] if packing.experts is None else torch.stack(of_each)).reshape(info.shape)


def matrix_of(info: TensorInfo, expert: int) -> TensorInfo:
    """One matrix of a stack [E, …] on disk."""
    size = prod(info.shape[1:]) * ITEMSIZE[info.dtype]
    return replace(info, shape=info.shape[1:], nbytes=size, offset=info.offset + expert * size)


def _packing(placement: Placement) -> PackedFrom:
    assert placement.info.packed_from is not None
    return placement.info.packed_from
