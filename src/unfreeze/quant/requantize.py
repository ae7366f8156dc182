"""Q(W'), a changed matrix in its old format again: the one rounding of a merge and of merge-aware training.

    refit  scales are computed again for W'
    keep   the old scales are used where they can hold W' (quant/kept.py)
    keep-change   as keep, with enough codes moved for the change to keep its length (quant/aimed.py)

Shapes: W [out, in]; parts as in the codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from unfreeze.quant.codec import ByRows, Codec
from unfreeze.quant.int4 import Int4
from unfreeze.quant.kept import by_rows, kept, refitted

if TYPE_CHECKING:
    from torch import Tensor

Scales = Literal["refit", "keep", "keep-change"]
BLOCK = 2**19  # weights rounded at a time: a Kimi-K2 matrix takes 0.4 core-seconds so, 1.3 in one piece


def requantized(
    codec: Codec, weight: Tensor, stored: Mapping[str, Tensor], scales: Scales
) -> dict[str, Tensor]:
    """The parts of Q(W') for float32 W', whose base has the parts `stored`."""
    fresh = refitted(codec, weight, stored)
    return kept(codec, weight, stored, fresh)[0] if scales == "keep" else fresh


def rows_at_once(codec: Codec, rows: int, columns: int) -> int:
    """Rows of a matrix that are rounded at a time: some 2^19 weights; all of them if one scale covers all."""
    if not by_rows(codec):
        return rows
    at = codec.rows_at if not isinstance(codec, Int4) and isinstance(codec, ByRows) else 1
    return max(1, BLOCK // (columns * at)) * at


def row_blocks(
    codec: Codec, shape: Sequence[int], stored: Mapping[str, Tensor]
) -> Iterator[tuple[int, int, Mapping[str, Tensor]]]:
    """(first row, last, their parts), of some 2^19 weights; all rows if one scale covers all."""
    rows, columns = shape
    step = rows_at_once(codec, rows, columns)
    blocks = [(first, min(first + step, rows)) for first in range(0, rows, step)]
    if isinstance(codec, Int4):  # every part has a row for each row of W
        for first, last in blocks:
            yield first, last, {suffix: part[first:last] for suffix, part in stored.items()}
    elif by_rows(codec) and isinstance(codec, ByRows):
        for first, last in blocks:
            yield first, last, codec.rows(stored, first, last)
    else:
        yield 0, rows, stored


def below(blocks: Sequence[Tensor]) -> Tensor:
    """Parts of rows, one below the other, for any dtype."""
    import torch

    if len(blocks) == 1:
        return blocks[0]
    return torch.cat([block.contiguous().view(torch.uint8) for block in blocks]).view(blocks[0].dtype)
