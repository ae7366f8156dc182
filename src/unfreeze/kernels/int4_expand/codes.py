"""An INT4 weight as the loops of a CPU read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from unfreeze.kernels.int4_expand.bucket import readable
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4


class Int4Codes(NamedTuple):
    """Views of the checkpoint's bytes for E matrices [N, M]. numba takes it as an argument."""

    codes: np.ndarray  # uint8 [E, N, M / 2]: two codes a byte, the low nibble first
    scales: np.ndarray  # uint16 [E, N, groups]: bits of bf16
    group_bytes: int  # bytes of codes that share a scale


def expandable(packed: Packed) -> bool:
    """Whether these loops can read it: int4 on CPU, contiguous, bf16 scales, an even group."""
    return packed.device.type == "cpu" and readable(packed)


def int4_codes(packed: Packed) -> Int4Codes:
    """The codes of a stack [E, N, M]. Raises ValueError where it is not `expandable`."""
    codec = packed.codec
    if not expandable(packed) or not isinstance(codec, Int4):
        raise ValueError("not an int4 weight these loops can read; see expandable()")
    codes, scales = packed.parts["weight_packed"], packed.parts["weight_scale"]
    return Int4Codes(
        codes.view(torch.uint8).numpy(), scales.view(torch.uint16).numpy(), codec.group_size // 2
    )
