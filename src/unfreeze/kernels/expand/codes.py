"""Packed weights as the CPU loops read them: one named tuple per format, which numba accepts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from unfreeze.kernels.expand.bucket import readable
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.int4 import Int4
from unfreeze.quant.mxfp4 import Mxfp4


class Int4Codes(NamedTuple):
    """Views of the checkpoint's bytes for E matrices [N, M]."""

    codes: np.ndarray  # uint8 [E, N, M / 2]: two codes a byte, the low nibble first
    scales: np.ndarray  # uint16 [E, N, groups]: bits of bf16
    group_bytes: int  # bytes of codes that share a scale


class Fp4Codes(NamedTuple):
    """The same for e2m1 with a power-of-two scale per 32 columns."""

    codes: np.ndarray  # uint8 [E, N, M / 2]: two codes a byte, the low half first
    scales: np.ndarray  # uint8 [E, N, M / 32]: exponents + 127


class Fp8Codes(NamedTuple):
    """The same for e4m3 with a scale per block, row or matrix. The scales are widened to float32."""

    codes: np.ndarray  # uint8 [E, N, M]
    scales: np.ndarray  # float32 [E, ceil(N / rows), ceil(M / columns)]
    rows: int
    columns: int
    narrow: bool  # True if the format's numbers are bf16: its scales are


class DenseWeights(NamedTuple):
    """E frozen matrices that need no expanding."""

    weights: np.ndarray  # float32, or uint16: bits of bf16 [E, N, M]


Codes = Int4Codes | Fp4Codes | Fp8Codes


def expandable(packed: Packed) -> bool:
    """True if these loops can read it: on CPU, contiguous, in a format and group size above."""
    return packed.device.type == "cpu" and bool(readable(packed))


def codes_of(packed: Packed) -> Codes:
    """The codes of a stack [E, N, M]. Raises ValueError if it is not `expandable`."""
    if not expandable(packed):
        raise ValueError("not a packed weight these loops can read; see expandable()")
    codec = packed.codec
    codes, scales = (packed.parts[suffix] for suffix in codec.suffixes[:2])
    if isinstance(codec, Int4):
        return Int4Codes(
            codes.view(torch.uint8).numpy(), scales.view(torch.uint16).numpy(), codec.group_size // 2
        )
    if isinstance(codec, Mxfp4):
        return Fp4Codes(codes.view(torch.uint8).flatten(2).numpy(), scales.view(torch.uint8).numpy())
    narrow = scales.dtype != torch.float32
    experts, rows, columns = codes.shape
    if isinstance(codec, Fp8):
        block = codec.block
    else:
        scales = scales.reshape(experts, -1, 1)
        block = (1 if scales.shape[1] == rows else rows, columns)
    return Fp8Codes(codes.view(torch.uint8).numpy(), scales.float().numpy(), *block, narrow)


def int4_codes(packed: Packed) -> Int4Codes:
    """`codes_of` an INT4 weight. Raises ValueError for any other."""
    codes = codes_of(packed)
    if not isinstance(codes, Int4Codes):
        raise ValueError(f"{packed.codec.name} where INT4 codes are read")
    return codes
