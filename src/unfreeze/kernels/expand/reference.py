"""The oracle for expand: the codec's dequantize, copied into place.

Works for every codec and device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unfreeze.quant.codec import ByRows, Packed
from unfreeze.quant.grids import AT_ONCE
from unfreeze.quant.halves import Halves


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


def expand_stack_reference(packed: Packed, experts: Sequence[int], out: Tensor) -> None:
    """out[m] = packed[experts[m]].dequantize(): as many matrices in one call as AT_ONCE allows.

    For a GPU, where a call's launches cost more than its bytes: NVFP4 takes 15, for one matrix or for all.
    """
    step = max(1, AT_ONCE.get(out.device.type, AT_ONCE["cuda"]) // max(1, out.shape[1] * out.shape[2]))
    for first in range(0, len(experts), step):
        some = list(experts[first : first + step])
        consecutive = some == list(range(some[0], some[0] + len(some)))
        index = slice(some[0], some[-1] + 1) if consecutive else torch.tensor(some, device=out.device)
        weight = packed.codec.dequantize({name: part[index] for name, part in packed.parts.items()})
        _copy(out[first : first + step], weight)


def _copy(out: Tensor, weight: Tensor) -> None:
    # float16 to bf16 takes 1 ns a weight directly, 0.2 through float32, with the same bits
    out.copy_(weight.float() if weight.dtype == torch.float16 else weight)


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
        _copy(out[first:last], codec.dequantize(codec.rows(matrix.parts, first, last)))
