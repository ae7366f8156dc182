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


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """words int32 [..., n] -> uint8 [..., 32 n / bits]: those of a word side by side, lowest bits first."""
    import torch

    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    found = words.contiguous().view(torch.uint8).unsqueeze(-1) >> shifts
    return (found & (2**bits - 1)).flatten(-2)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """words int32 [..., n, out] -> uint8 [..., 32 n / bits, out]: below each other, lowest bits first."""
    import torch

    # the four bytes of a word below each other, then the numbers of a byte
    rows = words.contiguous().view(torch.uint8).view(*words.shape, 4).transpose(-1, -2)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    found = rows.unsqueeze(-2) >> shifts.view(-1, 1)
    return (found & (2**bits - 1)).flatten(-4, -2)


def expand_rows(
    codes: Callable[[int, int], Tensor], zeros_GO: Tensor, scales_GO: Tensor, groups_I: Tensor
) -> Tensor:
    """(code - zero) * scale -> [in, out] in the dtype of the scales, some rows at a time.

    codes     (first row, row after the last) -> their codes [rows, out]
    groups_I  the group of each row
    The difference is a whole number within ±255, exact in any dtype of scales.
    """
    import torch

    rows, columns = len(groups_I), scales_GO.shape[-1]
    weight_IO = torch.empty(rows, columns, dtype=scales_GO.dtype, device=scales_GO.device)
    zeros_GO = zeros_GO.to(torch.int16)
    step = max(1, AT_ONCE // (WORD * columns)) * WORD  # whole words of codes
    for first in range(0, rows, step):
        last = min(first + step, rows)
        groups = groups_I[first:last]
        difference = (codes(first, last) - zeros_GO[groups]).to(scales_GO.dtype)
        torch.mul(difference, scales_GO[groups], out=weight_IO[first:last])
    return weight_IO


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
