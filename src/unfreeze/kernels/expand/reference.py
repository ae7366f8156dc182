"""The oracle for expand: the codec's dequantize, copied into place.

Works for every codec and device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.quant.codec import ByRows, Packed
from unfreeze.quant.halves import Halves

AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
"""Weights that are expanded at once: on a CPU they fit its cache, on a GPU launches are few."""


def expand_reference(packed: Packed, expert: int | None, out: Tensor) -> Tensor:
    """out = packed[expert].dequantize(), widened if `out` is float32.

    Shapes as in `expand`. Temporaries are several times AT_ONCE, or several times `out` if a format's rows
    cannot be cut.
    """
    matrix = packed if expert is None else packed[expert]
    if out.shape != matrix.shape:
        raise ValueError(f"out is {list(out.shape)}, the weight is {list(matrix.shape)}")
    if not isinstance(matrix.codec, Halves):
        _fill(out, matrix)
        return out
    for place, (codec, parts) in zip(out.chunk(2), matrix.codec.each(matrix.parts), strict=True):
        _fill(place, Packed(codec, parts))
    return out


def _fill(out: Tensor, matrix: Packed) -> None:
    """out = matrix.dequantize(), some rows at a time if its format allows it."""
    codec = matrix.codec
    if not isinstance(codec, ByRows):
        out.copy_(matrix.dequantize())
        return
    rows, columns = out.shape
    step = max(1, AT_ONCE.get(out.device.type, rows * columns) // (columns * codec.rows_at)) * codec.rows_at
    for first in range(0, rows, step):
        last = min(first + step, rows)
        weight = codec.dequantize(codec.rows(matrix.parts, first, last))
        # float16 to bf16 takes 1 ns a weight directly, 0.2 through float32, with the same bits
        out[first:last].copy_(weight.float() if weight.dtype == torch.float16 else weight)
