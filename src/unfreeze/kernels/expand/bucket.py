"""Classifies the input of the op: the format that its loops can read, and large or small calls."""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.quant.codec import Codec, Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.int4 import Int4
from unfreeze.quant.mxfp4 import Mxfp4

LARGE = 1 << 16  # numbers; below this the overhead of a call counts


def readable(packed: Packed) -> str:
    """The candidates' name of the format, "int4", "fp8" or "mxfp4"; "" if they cannot read it.

    Contiguous parts. INT4 with bf16 scales and an even group size, so that a byte is within one group. FP8
    with scales per block, row or matrix, in float32, bf16 or powers of two.
    """
    codec, kind = packed.codec, kind_of(packed.codec)
    parts = [packed.parts[suffix] for suffix in codec.suffixes[:2] if suffix in packed.parts]
    if len(parts) < 2 or not all(part.is_contiguous() for part in parts):
        return ""
    if isinstance(codec, Int4) and (codec.group_size % 2 or parts[1].dtype != torch.bfloat16):
        return ""
    if kind == "fp8" and parts[1].dtype not in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
        return ""
    return kind


def kind_of(codec: Codec) -> str:
    """The candidates' name of the format, whatever its parts are; "" if they do not know it."""
    if isinstance(codec, Int4):
        return "int4"
    if isinstance(codec, Fp8 | Fp8Scaled):
        return "fp8"
    return "mxfp4" if isinstance(codec, Mxfp4) else ""


def bucket(packed: Packed, expert: int | None, out: Tensor) -> str:
    """The bucket: "small" or "large" by the numbers written; FP8 and MXFP4 with the format's name.

    "other" for formats that only the reference reads.
    """
    kind = readable(packed)
    if not kind or out.stride(-1) != 1:
        return "other"
    size = "large" if out.numel() >= LARGE else "small"
    return size if kind == "int4" else f"{size}, {kind}"
