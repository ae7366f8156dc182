"""NVFP4: e2m1 codes, an e4m3 scale for each 16 of them, and one float32 number for the matrix.

compressed-tensors ("nvfp4-pack-quantized") divides by the number, to bf16:

    w[o, i] = bf16(e2m1[code[o, i]] * (scale[o, i // 16] / weight_global_scale))

NVIDIA's modelopt ("NVFP4") multiplies, to float32:

    w[o, i] = e2m1[code[o, i]] * (scale[o, i // 16] * weight_scale_2)

Products and quotients are float32. A code is 4 bits: sign, then one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; a byte
holds two, the lower half first, along the input dim. A weight takes 9 / 16 byte, against 2 in bf16. The files
also have scales of activations (input_global_scale, input_scale), which are not used: a server rounds
activations with them, training here does not.

Servers multiply q, k and v, and gate and up, in one product with one number: vLLM takes the largest of a
compressed-tensors file, of experts gate's. So such matrices have one number together (FUSED), as
llm-compressor writes them.

Source: compressed-tensors' NVFP4PackedCompressor and modelopt's NVFP4QTensor; bit-identical to both in
tests/quant/test_nvfp4.py.

Shapes: a matrix is [out, in] and has G = in / 16 scales per row. Gate and up of a stack of experts keep
separate numbers (quant/halves.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from unfreeze.quant.codec import Format, Part, Table, finite
from unfreeze.quant.mxfp4 import E2M1, pack_e2m1, round_to_e2m1, unpack_e2m1
from unfreeze.quant.scaled import KNOWN, MAX_E4M3, Kind, Scaled, refuse_group, refuse_weights

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 16  # columns that share a scale; there is no other NVFP4
MAX_CODE = E2M1[-1]
LEAST_SCALE = 2.0**-9  # the smallest above 0, which modelopt writes instead of 0
EMPTY = 0.125  # compressed-tensors' scale of a group of zeros


class Nvfp4Names(NamedTuple):
    """The format's name; the suffixes of codes and of the matrix's number; its shape; True if it divides."""

    name: str
    codes: str
    whole: str
    shape: tuple[int, ...]
    divides: bool


PACKED = Nvfp4Names("nvfp4-pack-quantized", "weight_packed", "weight_global_scale", (1,), divides=True)
MODELOPT = Nvfp4Names("nvfp4", "weight", "weight_scale_2", (), divides=False)
SCALE = "weight_scale"
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Linear layers that a server fuses. Source: packed_modules_mapping of the models of vLLM 0.33.0."""


@dataclass(frozen=True)
class Nvfp4(Scaled):
    """The codec. quant/codec.py documents each method. names: PACKED or MODELOPT."""

    kind: ClassVar[Kind] = Kind("NVFP4", "another group size", ("F8_E4M3",))
    names: Nvfp4Names = PACKED
    group: int = field(default=GROUP, init=False, repr=False)
    scale_dtype: str = field(default="F8_E4M3", init=False, repr=False)

    @property
    def name(self) -> str:
        return self.names.name

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (self.names.codes, SCALE, self.names.whole)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """Codes uint8 [out, in / 2], scales float8_e4m3fn [out, G], the matrix's number float32.

        Raises ConfigError if in is not a multiple of 16.
        """
        return {
            self.names.codes: ("U8", (out_features, in_features // 2)),
            SCALE: (self.scale_dtype, (out_features, self.groups(in_features))),
            self.names.whole: ("F32", self.names.shape),
        }

    def rows_each(self, suffix: str) -> int:
        return int(suffix != self.names.whole)

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The formula above -> [..., out, in], bf16 for PACKED and float32 for MODELOPT.

        Raises CheckpointError if the parts do not belong together.
        """
        lead = self.compare(parts)[:-2]
        codes, scales, whole = (parts[suffix] for suffix in self.suffixes)
        effective = self.effective(scales.float(), whole.reshape(*lead, 1, 1))
        weight = unpack_e2m1(codes).float().reshape(*scales.shape, GROUP)
        if not self.names.divides:
            weight = weight + 0.0  # modelopt reads the code of -0.0 as 0.0
        weight = (weight * effective.unsqueeze(-1)).flatten(-2)
        return weight.bfloat16() if self.names.divides else weight

    def effective(self, scales: Tensor, whole: Tensor) -> Tensor:
        """The factor of a code: float32 [..., out, G]."""
        return scales / whole if self.names.divides else scales * whole

    def number(self, largest: Tensor) -> Tensor:
        """The number of a matrix, float32, from its largest |w|; if several share it, from all of them."""
        import torch

        if not self.names.divides:
            return largest.float() / (MAX_CODE * MAX_E4M3)
        least = torch.finfo(largest.dtype).tiny
        return (MAX_E4M3 * MAX_CODE / largest.clamp(min=least)).nan_to_num(1.0, 1.0, 1.0).float()

    def keeps(self, weight: Tensor, whole: Tensor) -> bool:
        """True if a number made for another matrix serves this one: the largest |w| is at most half a step
        above its largest value, and has no scale below 1 (of at most 448), where e4m3 gets coarse."""
        import torch

        one = float(self.effective(torch.ones(()), whole.reshape(())))
        scale = float(weight.detach().abs().max()) / (MAX_CODE * one) if one else math.inf
        return 1 <= scale <= MAX_E4M3 * (MAX_CODE + 1) / MAX_CODE

    def quantize(self, weight: Tensor, whole: Tensor | None = None) -> dict[str, Tensor]:
        """The matrix's number from its largest weight, a scale from each group's, the nearest codes.

        whole: the number to use instead, float32 of one element.

        PACKED: number = 448 * 6 / absmax, scale = e4m3(number * (absmax of 16 / 6)), 0.125 for a group of
        zeros. MODELOPT: number = absmax / (6 * 448), scale = e4m3(absmax of 16 / (6 * number)), 1 for a group
        of zeros, and no less than 2 ** -9. Ties go to the even code.

        Source: compressed-tensors' generate_gparam, calculate_qparams and quantize; modelopt's NVFP4QTensor.
        Raises CheckpointError on a weight that is not finite.
        """
        import torch

        finite(weight)
        lead, weight = weight.shape[:-2], weight.detach()
        grouped = weight.reshape(*weight.shape[:-1], self.groups(weight.shape[-1]), GROUP)
        absmax = grouped.abs().amax(dim=-1)
        largest = absmax.amax(dim=(-2, -1), keepdim=True)
        whole = self.number(largest) if whole is None else whole.float().reshape(*lead, 1, 1)
        if self.names.divides:
            scales = (whole * (absmax / MAX_CODE)).clamp(max=MAX_E4M3).to(torch.float8_e4m3fn)
            scales = torch.where(scales.float() == 0, EMPTY, scales.float()).to(torch.float8_e4m3fn)
        else:
            scales = absmax.float() / (MAX_CODE * whole)
            scales = torch.where(scales.nan_to_num(0.0) == 0, 1.0, scales)
            scales = scales.clamp(LEAST_SCALE, MAX_E4M3).to(torch.float8_e4m3fn)
        scaled = grouped / self.effective(scales.float(), whole).unsqueeze(-1)
        # + 0.0: both libraries give -0.0 the code of 0.0; a matrix of zeros divides 0 by 0 in modelopt's
        codes = round_to_e2m1(scaled.float().nan_to_num(0.0).flatten(-2) + 0.0)
        return {
            self.names.codes: pack_e2m1(codes),
            SCALE: scales,
            self.names.whole: whole.reshape((*lead, *self.names.shape)),
        }


def read_packed(where: str, weights: Table) -> Nvfp4:
    """The codec of the `weights` of one compressed-tensors group of format "nvfp4-pack-quantized"."""
    refuse_weights(where, weights, 4, ("tensor_group",), GROUP)
    return Nvfp4(PACKED)


def read_modelopt(where: str, table: Table) -> Nvfp4:
    """The codec of modelopt's quant_algo "NVFP4" and "W4A16_NVFP4". Raises Unreadable for another group."""
    refuse_group(where, table, GROUP)
    return Nvfp4(MODELOPT)


FORMAT = (
    Format(
        "compressed-tensors nvfp4-pack-quantized",
        "nvfp4-pack-quantized",
        read_packed,
        KNOWN,
        ("weight_packed", SCALE, "weight_global_scale"),
    ),
    Format("modelopt NVFP4", "modelopt NVFP4", read_modelopt, frozenset(), (SCALE, "weight_scale_2")),
    Format(
        "modelopt W4A16_NVFP4", "modelopt W4A16_NVFP4", read_modelopt, frozenset(), (SCALE, "weight_scale_2")
    ),
)
