"""Panels of one expert's weight in any format: numba picks the loop by the type of the codes.

`weight` is one of expand/codes.py, E matrices [N, M]; e the expert; `first` and `panel` as in
loops/int4_panels.py for bf16 (a panel of uint32), as in loops/strips.py for float32.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import overload

from unfreeze.kernels.expand.codes import DenseWeights, Fp4Codes, Fp8Codes
from unfreeze.kernels.loops.bf16_tile import COLUMNS
from unfreeze.kernels.loops.float_panels import (
    pack_fp8_columns,
    pack_fp8_rows,
    pack_mxfp4_columns,
    pack_mxfp4_rows,
)
from unfreeze.kernels.loops.int4_panels import pack_int4_columns, pack_int4_rows
from unfreeze.kernels.loops.panels import pack_bf16_columns
from unfreeze.kernels.loops.strips import BF16, FLOAT32, FP8, INT4, MXFP4, append_rows, columns_of, rows_of
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.int4 import Int4


def fits(weight: Packed) -> bool:
    """True if 32 neighbouring weights of a row share a scale, and the columns are whole panels.

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
    return True  # MXFP4 has groups of 32; FP8 without blocks has one scale for a row or more


def pack_rows(weight: Any, e: int, first: int, panel: Any) -> None:
    """The columns of the panel are rows of W; inside numba loops only."""
    raise NotImplementedError("called by compiled loops")


def pack_columns(weight: Any, e: int, first: int, panel: Any) -> None:
    """The columns of the panel are columns of W; inside numba loops only."""
    raise NotImplementedError("called by compiled loops")


def append(rows: Any, first: int, panel: Any, begin: int) -> None:
    """Rows of a LoRA factor [., N] below `begin` rows of weights in a panel; inside numba loops only."""
    raise NotImplementedError("called by compiled loops")


@overload(pack_rows)
def _pack_rows(weight, e, first, panel):
    if panel.dtype == types.float32:
        return _strips(weight, rows_of)
    return _pairs(weight, pack_int4_rows, pack_mxfp4_rows, pack_fp8_rows)


@overload(pack_columns)
def _pack_columns(weight, e, first, panel):
    if panel.dtype == types.float32:
        return _strips(weight, columns_of)
    return _pairs(weight, pack_int4_columns, pack_mxfp4_columns, pack_fp8_columns)


@overload(append)
def _append(rows, first, panel, begin):
    if panel.dtype == types.float32:
        return lambda rows, first, panel, begin: append_rows(rows, first, panel, begin)
    return lambda rows, first, panel, begin: pack_bf16_columns(rows, first, panel, begin // 2)


def _pairs(weight: Any, int4: Any, mxfp4: Any, fp8: Any) -> Any:
    """Panels of bf16 pairs: the loop for the weight's format."""
    kind = weight.instance_class
    if kind is Fp4Codes:
        return lambda weight, e, first, panel: mxfp4(weight.codes[e], weight.scales[e], first, panel)
    if kind is Fp8Codes:
        return lambda weight, e, first, panel: fp8(
            weight.codes[e], weight.scales[e], weight.rows, weight.columns, first, panel
        )
    return lambda weight, e, first, panel: int4(
        weight.codes[e], weight.scales[e], weight.group_bytes, first, panel
    )


def _strips(weight: Any, loop_of: Any) -> Any:
    """Panels of float32 strips: the loop for the weight's format, with the shape of its scale blocks."""
    kind = weight.instance_class
    if kind is Fp4Codes:
        fill = loop_of(MXFP4)
        return lambda weight, e, first, panel: fill(weight.codes[e], weight.scales[e], 1, 32, 0, first, panel)
    if kind is Fp8Codes:
        fill = loop_of(FP8)
        return lambda weight, e, first, panel: fill(
            weight.codes[e], weight.scales[e], weight.rows, weight.columns, int(weight.narrow), first, panel
        )
    if kind is DenseWeights:
        fill = loop_of(FLOAT32 if weight.types[0].dtype == types.float32 else BF16)
        return lambda weight, e, first, panel: fill(
            weight.weights[e], weight.weights[e], 1, 32, 0, first, panel
        )
    fill = loop_of(INT4)
    return lambda weight, e, first, panel: fill(
        weight.codes[e], weight.scales[e], 1, 2 * weight.group_bytes, 1, first, panel
    )
