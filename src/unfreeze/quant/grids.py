"""Shared by integer formats with zero points: int32 words packed and unpacked, codes made and read.

    w[i, o] = (code[i, o] - zero[group of i, o]) * scale[group of i, o]     one rounding, to the scales' dtype
    code[i, o] = round(w[i, o] / scale) + zero, within 0 .. 2 ** bits - 1

A scale comes from the min and max weight of its group, 0 included: (max - min) / (2 ** bits - 1), in the
dtype of the file; then zero = round(-min / scale). If all zero points of a base are the middle (symmetric),
they stay there, and the scale is 2 absmax / (2 ** bits - 1): servers have kernels for such files that don't
read zero points.
Source: autoawq's and gptqmodel's quantizers, without their calibration.

AWQ and GPTQ hold a matrix with the input dimension first: W is the transpose of the stored one.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from unfreeze.core.dtypes import FLOATS
from unfreeze.core.errors import CheckpointError
from unfreeze.quant.codec import Table, Unreadable, finite

if TYPE_CHECKING:
    from torch import Tensor

WORD = 32  # bits of an int32
MAX_GROUP = 2**20  # input columns that share a scale; more than any layer's width
WHOLE_COLUMN = -1  # group_size that means one scale for all of them
LEAST_RANGE = 1e-5  # minimum range of a group's weights, so that a group of zeros has a scale too
AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
"""Weights that are expanded at once: on a CPU temporaries fit its cache, on a GPU launches are few."""
DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Dtypes of scales: name in safetensors -> name in torch."""


@dataclass(frozen=True)
class Grid:
    """The scales and zero points that the codes of one matrix refer to.

    bits       of a code
    zeros_OG   zero points, whole numbers of any dtype
    scales_OG  in the dtype of the file
    groups_I   int64, the group of each input column
    """

    bits: int
    zeros_OG: Tensor
    scales_OG: Tensor
    groups_I: Tensor

    @property
    def symmetric(self) -> bool:
        """True if every zero point is the middle, 2 ** (bits - 1)."""
        return bool((self.zeros_OG == 1 << (self.bits - 1)).all())

    def made_for(self, weight_OI: Tensor) -> Grid:
        """The same groups with scales and zero points for these weights.

        Raises CheckpointError for a weight that is not finite.
        """
        import torch

        finite(weight_OI)
        top, rows = (1 << self.bits) - 1, len(weight_OI)
        low_OG, high_OG = torch.zeros(2, rows, self.scales_OG.shape[1], device=weight_OI.device)
        step = max(1, at_once(weight_OI) // weight_OI.shape[1])
        for first in range(0, rows, step):
            some = slice(first, first + step)
            weight = weight_OI[some].detach().float()
            group_OI = self.groups_I.expand(weight.shape)
            low_OG[some] = low_OG[some].scatter_reduce(1, group_OI, weight, "amin")
            high_OG[some] = high_OG[some].scatter_reduce(1, group_OI, weight, "amax")
        if self.symmetric:
            high_OG = torch.maximum(high_OG, -low_OG)
            low_OG = -high_OG
        scales_OG = ((high_OG - low_OG).clamp(min=LEAST_RANGE) / top).to(self.scales_OG.dtype)
        zeros_OG = (-low_OG / scales_OG.float()).round().clamp(0, top)
        return replace(self, zeros_OG=self.zeros_OG if self.symmetric else zeros_OG, scales_OG=scales_OG)

    def codes(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """(codes uint8 [O, I], bool [O, G]: True if some weight is over half a step from every code)."""
        import torch

        top = (1 << self.bits) - 1
        codes_OI = torch.empty(weight_OI.shape, dtype=torch.uint8, device=weight_OI.device)
        beyond_OG = torch.zeros(self.scales_OG.shape, device=weight_OI.device)
        step = max(1, at_once(weight_OI) // weight_OI.shape[1])
        for first in range(0, len(weight_OI), step):
            some = slice(first, first + step)
            scales_OG, zeros_OG = self.scales_OG[some].float(), self.zeros_OG[some].float()
            weight = weight_OI[some].detach().float()
            none = scales_OG == 0  # represents 0 only
            scale = scales_OG.masked_fill(none, 1.0).index_select(1, self.groups_I)
            zero = zeros_OG.index_select(1, self.groups_I)
            steps = weight / scale
            beyond = (steps + zero - top / 2).abs() > (top + 1) / 2
            beyond |= none.index_select(1, self.groups_I) & (weight != 0)
            beyond_OG[some].index_add_(1, self.groups_I, beyond.float())
            codes_OI[some] = (steps.round() + zero).clamp(0, top)
        return codes_OI, beyond_OG > 0

    def mixed(self, other: Grid, which_OG: Tensor) -> Grid:
        """Scales and zero points of `other` where `which_OG`, else of this grid."""
        zeros_OG = other.zeros_OG.float().where(which_OG, self.zeros_OG.float())
        scales_OG = other.scales_OG.where(which_OG, self.scales_OG)
        return replace(self, zeros_OG=zeros_OG, scales_OG=scales_OG)


@runtime_checkable
class Gridded(Protocol):
    """A codec whose matrix is codes on a Grid."""

    def grid(self, parts: Mapping[str, Tensor]) -> Grid:
        """The grid of one matrix."""
        ...

    def written(self, codes_OI: Tensor, grid: Grid) -> dict[str, Tensor]:
        """The parts of one matrix with these codes on that grid."""
        ...


def at_once(tensor: Tensor) -> int:
    """AT_ONCE on the tensor's device."""
    return AT_ONCE.get(tensor.device.type, AT_ONCE["cpu"])


def plain_grid(bits: int, scale_dtype: str, weight_OI: Tensor, size: int) -> Grid:
    """An empty asymmetric grid with consecutive groups of `size` columns. For `made_for`."""
    import torch

    rows, columns = weight_OI.shape
    groups_I = torch.arange(columns, device=weight_OI.device) // (columns if size == WHOLE_COLUMN else size)
    zeros_OG = torch.zeros(rows, int(groups_I[-1]) + 1, device=weight_OI.device)
    return Grid(bits, zeros_OG, zeros_OG.to(getattr(torch, DTYPES[scale_dtype])), groups_I)


def fresh_parts(codec: Gridded, weight: Tensor, grid: Callable[[Tensor], Grid]) -> dict[str, Tensor]:
    """The parts of W [..., O, I] with scales and zero points computed for it. grid: matrix -> its groups."""
    import torch

    if weight.dim() == 2:
        fitted = grid(weight).made_for(weight)
        return codec.written(fitted.codes(weight)[0], fitted)
    matrices = [fresh_parts(codec, matrix, grid) for matrix in weight]
    return {suffix: torch.stack([parts[suffix] for parts in matrices]) for suffix in matrices[0]}


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Whole numbers [..., n] -> int32 [..., ceil(n bits / 32)], lowest bits first, zero-padded."""
    import torch

    per_word = WORD // bits
    missing = -numbers.shape[-1] % per_word
    numbers = torch.nn.functional.pad(numbers.to(torch.uint8).contiguous(), (0, missing))
    by_word = numbers.view(*numbers.shape[:-1], -1, per_word)
    words = by_word[..., 0].int()
    for place in range(1, per_word):
        words |= by_word[..., place].int() << (bits * place)
    return words


def unpack(words: Tensor, bits: int) -> Tensor:
    """words int32 [..., n] -> uint8 [..., 32 n / bits]: the numbers of a word in order, lowest bits first.

    A word is spread over 8 bytes by shifts that vector units do, half the distance each time.
    """
    import torch

    if bits == 8:
        return words.contiguous().view(torch.uint8)
    x = words.long() & 0xFFFFFFFF
    x = (x | x << 16) & 0x0000FFFF_0000FFFF
    x = (x | x << 8) & 0x00FF00FF_00FF00FF
    codes = ((x | x << 4) & 0x0F0F0F0F_0F0F0F0F).view(torch.uint8)
    if bits == 4:
        return codes
    pairs = codes.to(torch.int16)  # from two codes in a byte to two bytes
    return ((pairs | pairs << 6) & 0x0303).view(torch.uint8)


def expand(
    codes: Callable[[int, int], Tensor], zeros_OG: Tensor, scales_OG: Tensor, groups_I: Tensor | None
) -> Tensor:
    """(code - zero) * scale -> [out, in] in the dtype of the scales, some rows at a time.

    codes     (first row, row after the last) -> their codes, uint8 [rows, in]
    groups_I  the group of each column; None if all groups have equal length and are consecutive

    The difference is a whole number within ±255. Its product with a scale of 16 bits is exact in float32, so
    there is one rounding, to the dtype of the scales.
    """
    import torch

    rows, groups = scales_OG.shape
    columns = codes(0, 1).shape[1]
    weight_OI = torch.empty(rows, columns, dtype=scales_OG.dtype, device=scales_OG.device)
    zeros_OG, scales_OG = zeros_OG.float(), scales_OG.float()
    step = max(1, at_once(weight_OI) // (WORD * columns)) * WORD  # whole words of codes
    for first in range(0, rows, step):
        last = min(first + step, rows)
        x, zeros, scales = codes(first, last).float(), zeros_OG[first:last], scales_OG[first:last]
        if groups_I is None:
            x.view(last - first, groups, -1).sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
        else:
            x.sub_(zeros.index_select(1, groups_I)).mul_(scales.index_select(1, groups_I))
        weight_OI[first:last] = x
    return weight_OI


def each(
    function: Callable[[Mapping[str, Tensor]], Tensor], parts: Mapping[str, Tensor], codes: str
) -> Tensor:
    """function(parts of one matrix) for every matrix of a stack, stacked.

    codes: the suffix of the part that has two dims for one matrix.
    """
    import torch

    if parts[codes].dim() == 2:
        return function(parts)
    one = ({suffix: part[i] for suffix, part in parts.items()} for i in range(len(parts[codes])))
    return torch.stack([each(function, matrix, codes) for matrix in one])


def scale_dtype(dtypes: Mapping[str, str], scales: str, codes: str) -> str | None:
    """The dtype in the files of the `scales` tensors with `codes` beside them; None if there are none.

    dtypes: name on disk -> dtype. Raises CheckpointError for several: a stack of experts can hold only one.
    """
    first: dict[str, str] = {}
    for name, dtype in dtypes.items():
        base, _, suffix = name.rpartition(".")
        if suffix == scales and dtype in FLOATS and f"{base}.{codes}" in dtypes:
            first.setdefault(dtype, name)
    if len(first) > 1:
        named = ", ".join(f"{name} is {dtype}" for dtype, name in first.items())
        raise CheckpointError(
            f"the scales of packed weights have {len(first)} dtypes: {named}",
            next="convert them to the widest of these",
        )
    return next(iter(first), None)


def read_group_size(table: Table, where: str) -> int:
    """group_size: at least 1, or -1 for one scale per output column. Raises Unreadable."""
    size = table.get("group_size", 128)
    if not isinstance(size, int) or isinstance(size, bool) or not (size == -1 or 1 <= size <= MAX_GROUP):
        raise Unreadable(f"{where}: group_size {size!r}")
    return size
