"""What formats of whole numbers with zero points share: int32 words unpacked, scales of one dtype.

    w[i, o] = (code[i, o] - zero[group of i, o]) * scale[group of i, o]     one rounding, to the scales' dtype

AWQ and GPTQ hold a matrix with the input dimension first: W is what stands there, transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from unfreeze.core.dtypes import FLOATS
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import Table, Unreadable

if TYPE_CHECKING:
    from torch import Tensor

WORD = 32  # bits of an int32
MAX_GROUP = 2**20  # input columns that share a scale; more than the widest layer has
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
