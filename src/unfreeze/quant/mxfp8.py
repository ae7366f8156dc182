"""MXFP8: e4m3 codes with a power of two for each 32 of them, as compressed-tensors and modelopt write it.

    w[o, i] = e4m3[code[o, i]] * 2 ** (scale[o, i // 32] - 127)     exact in bf16

A scale is one byte, the exponent alone (e8m0). A weight takes 33 / 32 byte, against 2 in bf16. The two
libraries differ in the scale that they choose for a weight, not in how they read one.
Source: compressed-tensors' MXFP8QuantizationCompressor and modelopt's MXFP8QTensor; equal to both bit for bit
in tests/quant/test_mxfp8.py.

Shapes: a matrix is [out, in] and has G = in / 32 scales per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import (
    Format,
    Part,
    Table,
    Unreadable,
    finite,
    one_scale_dtype,
    parts_nbytes,
    refuse_other_values,
)
from unfreeze.quant.mxfp4 import BIAS, GROUP, KNOWN, ONLY, SCALES, powers_of_two

if TYPE_CHECKING:
    from torch import Tensor

MAX_CODE = 448.0  # the largest float8_e4m3fn
OFFSET = 8  # exponent of 256, the largest power of two among the codes
SUFFIXES = ("weight", "weight_scale")


@dataclass(frozen=True)
class Mxfp8:
    """The codec. quant/codec.py says what each method promises.

    above        whether `quantize` takes modelopt's scales, under which no code is cut off
    scale_dtype  dtype of the scales in the files and in memory: U8 or F8_E8M0, the same byte
    """

    above: bool = False
    scale_dtype: str = "U8"
    name: str = field(default="mxfp8", init=False, repr=False)
    suffixes: tuple[str, ...] = field(default=SUFFIXES, init=False, repr=False)
    variants: str = field(default="another group size", init=False, repr=False, compare=False)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """weight float8_e4m3fn [out, in], weight_scale [out, G].

        Raises ConfigError if in is not a multiple of 32.
        """
        if in_features % GROUP:
            raise ConfigError(
                f"{in_features} input columns do not divide into groups of {GROUP}, as MXFP8 needs",
                next="compare the layer's width in config.json with the checkpoint's publisher",
            )
        return {
            "weight": ("F8_E4M3", (out_features, in_features)),
            "weight_scale": (self.scale_dtype, (out_features, in_features // GROUP)),
        }

    def as_stored(self, dtypes: Mapping[str, str]) -> Mxfp8:
        """This codec with the scale_dtype of the files. Only scales that have codes beside them count."""
        found = {
            name: dtype
            for name, dtype in dtypes.items()
            if name.rpartition(".")[2] == "weight_scale"
            and dtype in SCALES
            and dtypes.get(f"{name.rpartition('.')[0]}.weight") == "F8_E4M3"
        }
        return replace(self, scale_dtype=one_scale_dtype(found, "MXFP8")) if found else self

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """None: all parts are kept."""
        return {}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in], that of the codes."""
        return parts["weight"]

    def nbytes(self, out_features: int, in_features: int) -> int:
        """out * (in + in / 32)."""
        return parts_nbytes(self.parts(out_features, in_features).values())

    @property
    def rows_at(self) -> int:
        return 1

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        return {suffix: part[first:last] for suffix, part in parts.items()}

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = e4m3[code] * 2 ** (scale - 127) -> bf16 [..., out, in], exact.

        Raises CheckpointError where codes and scales do not belong together.
        """
        import torch

        codes, scales = parts["weight"], parts["weight_scale"]
        needed = [*codes.shape[:-1], codes.shape[-1] // GROUP]
        if codes.dtype != torch.float8_e4m3fn or list(scales.shape) != needed or codes.shape[-1] % GROUP:
            raise CheckpointError(
                f"weight is {codes.dtype} {list(codes.shape)} with weight_scale {list(scales.shape)}; MXFP8"
                f" needs torch.float8_e4m3fn and {needed}",
                next="get the checkpoint again: a tensor is truncated or in another format",
            )
        grouped = codes.bfloat16().reshape(*scales.shape, GROUP)
        return (grouped * powers_of_two(scales.view(torch.uint8)).unsqueeze(-1)).flatten(-2)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """code = e4m3(w / scale). The scale of 32 weights is a power of two by the largest of them.

        compressed-tensors: its power of two / 256, the next one where its mantissa is 1.75 or more; codes
        beyond 448 become 448. modelopt (`above`): the least one that is absmax / 448 or more.
        Raises CheckpointError on a weight that is not finite.
        """
        import torch

        finite(weight)
        self.parts(weight.shape[-2], weight.shape[-1])
        grouped = weight.detach().float().reshape(*weight.shape[:-1], -1, GROUP)
        absmax = grouped.abs().amax(dim=-1)
        if self.above:
            exponent = (absmax / MAX_CODE).log2().ceil().clamp(-BIAS, BIAS) + BIAS
        else:
            # a quarter is added to the mantissa, and what it carries into the exponent is the rounding
            exponent = ((absmax.view(torch.int32) + (1 << 21)) >> 23) - OFFSET
        scales = exponent.clamp(0, 254).to(torch.uint8)
        scaled = torch.ldexp(grouped, (BIAS - scales.int()).unsqueeze(-1)).clamp(-MAX_CODE, MAX_CODE)
        return {
            "weight": scaled.flatten(-2).to(torch.float8_e4m3fn),
            "weight_scale": scales if self.scale_dtype == "U8" else scales.view(torch.float8_e8m0fnu),
        }


def read(where: str, weights: Table) -> Mxfp8:
    """The codec of the `weights` of one compressed-tensors group of format "mxfp8-quantized".

    Raises Unreadable, naming it, for each variant that would be read wrongly.
    """
    refuse_other_values(weights, ONLY, f"{where}.weights")
    if weights.get("type") != "float" or weights.get("num_bits") != 8:
        raise Unreadable(f"{where}: {weights.get('type')} weights with num_bits {weights.get('num_bits')}")
    if weights.get("symmetric", True) is not True or weights.get("dynamic"):
        raise Unreadable(f"{where}: asymmetric or dynamic weights")
    if weights.get("strategy") != "group" or weights.get("group_size") != GROUP:
        raise Unreadable(
            f'{where}: strategy "{weights.get("strategy")}" with group_size {weights.get("group_size")!r:.60}'
        )
    return Mxfp8()


def read_modelopt(where: str, table: Table) -> Mxfp8:
    """The codec of modelopt's quant_algo "MXFP8". Raises Unreadable for another group."""
    if table.get("group_size", GROUP) != GROUP:
        raise Unreadable(f"{where}: group_size {table.get('group_size')!r:.60}")
    return Mxfp8(above=True)


FORMAT = (
    Format("compressed-tensors mxfp8-quantized", "mxfp8-quantized", read, KNOWN | ONLY.keys(), SUFFIXES[1:]),
    Format("modelopt MXFP8", "modelopt MXFP8", read_modelopt, frozenset(), SUFFIXES[1:]),
)
