"""Which kind of input int4_expand is given: what its loops can read, and whether a call is large."""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

LARGE = 1 << 16  # numbers; below, what a call costs before its loop counts


def readable(packed: Packed) -> bool:
    """Whether the candidates take it: Int4 in one piece with bf16 scales and an even group.

    With an even group a byte lies in one group.
    """
    if not isinstance(packed.codec, Int4) or packed.codec.group_size % 2:
        return False
    codes, scales = packed.parts["weight_packed"], packed.parts["weight_scale"]
    return codes.is_contiguous() and scales.is_contiguous() and scales.dtype == torch.bfloat16


def bucket(packed: Packed, expert: int | None, out: Tensor) -> str:
    """ "small" or "large" by the numbers written, "other" for what only the reference reads."""
    if not readable(packed) or out.stride(-1) != 1:
        return "other"
    return "large" if out.numel() >= LARGE else "small"
