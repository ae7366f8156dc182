"""What formats of whole numbers with zero points share: int32 words unpacked, scales of one dtype.

    w[i, o] = (code[i, o] - zero[group of i, o]) * scale[group of i, o]     one rounding, to the scales' dtype

AWQ and GPTQ hold a matrix with the input dimension first: W is what stands there, transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from unfreeze.core.dtypes import FLOATS
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import Table, Unreadable

if TYPE_CHECKING:
    from torch import Tensor

WORD = 32  # bits of an int32
MAX_GROUP = 2**20  # input columns that share a scale; more than the widest layer has
AT_ONCE = 2**18  # weights that are expanded at once, so that what lies between codes and result stays small
WHOLE_COLUMN = -1  # group_size of one scale for all of them


def unpack(words: Tensor, bits: int) -> Tensor:
    """words int32 [..., n] -> uint8 [..., 32 n / bits]: those of a word side by side, lowest bits first.

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
    pairs = codes.to(torch.int16)  # two codes in a byte, to two bytes
    return ((pairs | pairs << 6) & 0x0303).view(torch.uint8)


def expand(
    codes: Callable[[int, int], Tensor], zeros_OG: Tensor, scales_OG: Tensor, groups_I: Tensor | None
) -> Tensor:
    """(code - zero) * scale -> [out, in] in the dtype of the scales, some rows at a time.

    codes     (first row, row after the last) -> their codes, uint8 [rows, in]
    groups_I  the group of each column; None where all groups are equally long, one after the other
    The difference is a whole number within ±255. Its product with a scale of 16 bits is exact in float32, so
    one rounding is made, to the dtype of the scales.
    """
    import torch

    rows, groups = scales_OG.shape
    columns = codes(0, 1).shape[1]
    weight_OI = torch.empty(rows, columns, dtype=scales_OG.dtype, device=scales_OG.device)
    zeros_OG, scales_OG = zeros_OG.float(), scales_OG.float()
    step = max(1, AT_ONCE // (WORD * columns)) * WORD  # whole words of codes
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
    """The dtype in the files of the tensors called `scales` with `codes` beside them; None if there are none.

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


def refuse_to_write(name: str) -> ConfigError:
    """The error of a format whose codes only its own calibration can make."""
    return ConfigError(
        f"{name} is read, not written: its scales come from a calibration that is not built here",
        next="write bf16 or int4 instead: unfreeze merge RUN --to int4",
    )
