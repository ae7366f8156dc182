"""Classifies the input of the op: the format that its loops can read, and large or small calls.

Triton reads every format (`triton_kind`), the CPU's loops three of them (`readable`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.quant.awq import Awq
from unfreeze.quant.bitsandbytes import Bits4, Bits8
from unfreeze.quant.codec import Codec, Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.gptq import Gptq
from unfreeze.quant.int4 import Int4
from unfreeze.quant.integers import Integers
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.mxfp8 import Mxfp8
from unfreeze.quant.nvfp4 import Nvfp4

LARGE = 1 << 16  # numbers; below this the overhead of a call counts
OTHER_INT4, OTHER_FP8 = "int4, any group", "fp8, float16 scales"
KINDS: dict[type, str] = {
    Int4: OTHER_INT4,
    Fp8: OTHER_FP8,
    Fp8Scaled: OTHER_FP8,
    Mxfp4: "mxfp4",
    Mxfp8: "mxfp8",
    Nvfp4: "nvfp4",
    Bits4: "nf4",
    Bits8: "int8",
    Awq: "awq",
    Gptq: "gptq",
}
"""Format -> its name in buckets, if `readable` has none for it."""


def readable(packed: Packed) -> str:
    """The name of the format for the CPU's loops, "int4", "fp8" or "mxfp4"; "" if they cannot read it.

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
    """The CPU loops' name of the format, whatever its parts are; "" if they do not know it."""
    if isinstance(codec, Int4):
        return "int4"
    if isinstance(codec, Fp8 | Fp8Scaled):
        return "fp8"
    return "mxfp4" if isinstance(codec, Mxfp4) else ""


def triton_kinds(codec: Codec) -> set[str]:
    """The names that weights of the format may have for the Triton kernels, whatever their parts are."""
    if isinstance(codec, Integers):
        return {"integers" if codec.packed else "int8"}
    return {kind_of(codec), KINDS.get(type(codec), "")} - {""}


def triton_kind(packed: Packed) -> str:
    """The name of the format for the Triton kernels; "" if they cannot read it: parts are contiguous."""
    if not packed.parts or not all(part.is_contiguous() for part in packed.parts.values()):
        return ""
    codec = packed.codec
    if isinstance(codec, Integers):
        return "integers" if codec.packed else "int8"
    return readable(packed) or KINDS.get(type(codec), "")


def bucket(packed: Packed, expert: int | None, out: Tensor) -> str:
    """The bucket: "small" or "large" by the numbers written, and the format's name, unless it is "int4".

    "other" for what only the reference reads.
    """
    kind = triton_kind(packed)
    if not kind or out.stride(-1) != 1:
        return "other"
    size = "large" if out.numel() >= LARGE else "small"
    return size if kind == "int4" else f"{size}, {kind}"
