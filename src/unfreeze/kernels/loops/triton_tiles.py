"""Part of the Triton kernels on rows sorted by expert: the rows of a tile, found on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of_tile(tile, offsets, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, its first row in this tile, the end of its rows), all int64; expert -1 for a spare tile.

    Experts are cut into tiles of ROWS rows one after the other, so the host needs no offsets: it launches
    n / ROWS + E tiles at most. offsets int32: the end of each expert's rows. EXPERTS: a power of two.
    """
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + expert, mask=expert < num_experts, other=0)
    begins = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    tiles = tl.where(expert < num_experts, (ends - begins + ROWS - 1) // ROWS, 0)
    through = tl.cumsum(tiles, axis=0)
    mine = (through - tiles <= tile) & (tile < through)  # true for at most one expert
    e = tl.sum(tl.where(mine, expert + 1, 0), axis=0) - 1
    first = tl.sum(tl.where(mine, begins + (tile - through + tiles) * ROWS, 0), axis=0)
    end = tl.sum(tl.where(mine, ends, 0), axis=0)
    return e.to(tl.int64), first.to(tl.int64), end.to(tl.int64)
