"""The oracle for expand: the codec's own dequantize, copied into place.

Works for every codec and device.
"""

from __future__ import annotations

from torch import Tensor

from unfreeze.quant.codec import Packed


def expand_reference(packed: Packed, expert: int | None, out: Tensor) -> Tensor:
    """out = packed[expert].dequantize(), widened if `out` is float32.

    Shapes as in `expand`. Makes temporaries of several times `out`.
    """
    matrix = packed if expert is None else packed[expert]
    if out.shape != matrix.shape:
        raise ValueError(f"out is {list(out.shape)}, the weight is {list(matrix.shape)}")
    return out.copy_(matrix.dequantize())
