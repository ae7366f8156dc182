"""Panels of one expert's weight, whatever its format: numba picks the loop by the type of the codes.

`weight` is one of expand/codes.py, E matrices [N, M]; e the expert; `first` and `panel` as in
loops/int4_panels.py.
"""

from __future__ import annotations

from typing import Any

from numba.extending import overload

from unfreeze.kernels.expand.codes import Fp4Codes, Fp8Codes
from unfreeze.kernels.loops.bf16_tile import COLUMNS
from unfreeze.kernels.loops.float_panels import (
    pack_fp8_columns,
    pack_fp8_rows,
    pack_mxfp4_columns,
    pack_mxfp4_rows,
)
from unfreeze.kernels.loops.int4_panels import pack_int4_columns, pack_int4_rows
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.int4 import Int4


def fits(weight: Packed) -> bool:
    """Whether 32 neighbouring weights of a row share a scale, and the columns are whole panels.

    For a weight that is `expandable` (expand/codes.py).
    """
    codec, (_, rows, columns) = weight.codec, weight.shape
    if columns % COLUMNS or rows % COLUMNS:
        return False
    if isinstance(codec, Int4):
        return codec.group_size % 32 == 0
    if isinstance(codec, Fp8):
        down, across = codec.block
        return (down == 1 or down % COLUMNS == 0) and (across % 32 == 0 or across >= columns)
    return True  # MXFP4 has groups of 32; FP8 without blocks a scale for a row or more


def pack_rows(weight: Any, e: int, first: int, panel: Any) -> None:
    """panel[k, j] = (W[first + j, 2k], W[first + j, 2k + 1]); inside numba loops only."""
    raise NotImplementedError("called by compiled loops")


def pack_columns(weight: Any, e: int, first: int, panel: Any) -> None:
    """panel[k, j] = (W[2k, first + j], W[2k + 1, first + j]); inside numba loops only."""
    raise NotImplementedError("called by compiled loops")


@overload(pack_rows)
def _pack_rows(weight, e, first, panel):
    kind = weight.instance_class
    if kind is Fp4Codes:
        return lambda weight, e, first, panel: pack_mxfp4_rows(
            weight.codes[e], weight.scales[e], first, panel
        )
    if kind is Fp8Codes:
        return lambda weight, e, first, panel: pack_fp8_rows(
            weight.codes[e], weight.scales[e], weight.rows, weight.columns, first, panel
        )
    return lambda weight, e, first, panel: pack_int4_rows(
        weight.codes[e], weight.scales[e], weight.group_bytes, first, panel
    )


@overload(pack_columns)
def _pack_columns(weight, e, first, panel):
    kind = weight.instance_class
    if kind is Fp4Codes:
        return lambda weight, e, first, panel: pack_mxfp4_columns(
            weight.codes[e], weight.scales[e], first, panel
        )
    if kind is Fp8Codes:
        return lambda weight, e, first, panel: pack_fp8_columns(
            weight.codes[e], weight.scales[e], weight.rows, weight.columns, first, panel
        )
    return lambda weight, e, first, panel: pack_int4_columns(
        weight.codes[e], weight.scales[e], weight.group_bytes, first, panel
    )
