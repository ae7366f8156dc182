"""MXFP8: e4m3 codes with a power-of-two scale per 32 of them, as compressed-tensors and modelopt write it.

    w[o, i] = e4m3[code[o, i]] * 2 ** (scale[o, i // 32] - 127)     exact in bf16

A scale is one byte, the exponent alone (e8m0). A weight takes 33 / 32 byte, against 2 in bf16. The two
libraries choose different scales for a weight, but read them the same way.

Source: compressed-tensors' MXFP8QuantizationCompressor and modelopt's MXFP8QTensor; bit-identical to both in
tests/quant/test_mxfp8.py.

Shapes: a matrix is [out, in] and has G = in / 32 scales per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from unfreeze.quant.codec import Format, Part, Table, finite
from unfreeze.quant.mxfp4 import GROUP, powers_of_two
from unfreeze.quant.scaled import (
    BIAS,
    EXPONENTS,
    KNOWN,
    MAX_E4M3,
    Kind,
    Scaled,
    as_exponents,
    by_exponents,
    exponents,
    refuse_group,
    refuse_weights,
    to_e4m3,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

OFFSET = 8  # exponent of 256, the largest power of two among the codes


@dataclass(frozen=True)
class Mxfp8(Scaled):
    """The codec. quant/codec.py documents each method.

    above        True if `quantize` uses modelopt's scales, which never clip a code
    scale_dtype  dtype of the scales in the files and in memory: U8 or F8_E8M0, the same byte
    """

    kind: ClassVar[Kind] = Kind("MXFP8", "another group size", EXPONENTS)
    above: bool = False
    scale_dtype: str = "U8"
    group: int = field(default=GROUP, init=False, repr=False)

    @property
    def name(self) -> str:
        return "mxfp8"

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("weight", "weight_scale")

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """weight float8_e4m3fn [out, in], weight_scale [out, G].

        Raises ConfigError if in is not a multiple of 32.
        """
        return {
            "weight": ("F8_E4M3", (out_features, in_features)),
            "weight_scale": (self.scale_dtype, (out_features, self.groups(in_features))),
        }

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = e4m3[code] * 2 ** (scale - 127) -> bf16 [..., out, in], exact.

        Raises CheckpointError if codes and scales do not belong together.
        """
        self.compare(parts)
        scales = parts["weight_scale"]
        grouped = parts["weight"].bfloat16().reshape(*scales.shape, GROUP)
        return (grouped * powers_of_two(scales).unsqueeze(-1)).flatten(-2)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """code = e4m3(w / scale). The scale of 32 weights is a power of two set by the largest of them.

        compressed-tensors: its power of two / 256, the next one if its mantissa is 1.75 or more; codes beyond
        448 become 448. modelopt (`above`): the smallest one that is at least absmax / 448. Raises
        CheckpointError on a weight that is not finite.
        """
        import torch

        finite(weight)
        grouped = weight.detach().float().reshape(*weight.shape[:-1], self.groups(weight.shape[-1]), GROUP)
        absmax = grouped.abs().amax(dim=-1)
        if self.above:
            exponent = (absmax / MAX_E4M3).log2().ceil().clamp(-BIAS, BIAS) + BIAS
            scales = exponent.clamp(0, 254).to(torch.uint8)
        else:
            scales = exponents(absmax, OFFSET, 254)
        return {
            "weight": to_e4m3(by_exponents(grouped, scales).flatten(-2)),
            "weight_scale": as_exponents(scales, self.scale_dtype),
        }


def read(where: str, weights: Table) -> Mxfp8:
    """The codec of the `weights` of one compressed-tensors group of format "mxfp8-quantized"."""
    refuse_weights(where, weights, 8, ("group",), GROUP)
    return Mxfp8()


def read_modelopt(where: str, table: Table) -> Mxfp8:
    """The codec of modelopt's quant_algo "MXFP8". Raises Unreadable for another group."""
    refuse_group(where, table, GROUP)
    return Mxfp8(above=True)


_SUFFIXES = ("weight_scale",)
FORMAT = (
    Format("compressed-tensors mxfp8-quantized", "mxfp8-quantized", read, KNOWN, _SUFFIXES),
    Format("modelopt MXFP8", "modelopt MXFP8", read_modelopt, frozenset(), _SUFFIXES),
)
