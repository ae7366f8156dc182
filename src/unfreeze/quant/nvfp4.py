"""NVFP4: e2m1 codes, an e4m3 scale for each 16 of them, and one float32 number for the matrix.

compressed-tensors ("nvfp4-pack-quantized"), where the number divides, to bf16:
    w[o, i] = bf16(e2m1[code[o, i]] * (scale[o, i // 16] / weight_global_scale))
NVIDIA's modelopt ("NVFP4"), where it multiplies, to float32:
    w[o, i] = e2m1[code[o, i]] * (scale[o, i // 16] * weight_scale_2)

Products and quotients are float32. A code is 4 bits: sign, then one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; two lie in
a byte, the lower half first, along the input dim. A weight takes 9 / 16 byte, against 2 in bf16.
Scales of activations (input_global_scale, input_scale) lie beside and are not used: a server rounds
activations with them, training here rounds none.
Source: compressed-tensors' NVFP4PackedCompressor and modelopt's NVFP4QTensor; equal to both bit for bit in
tests/quant/test_nvfp4.py.

Shapes: a matrix is [out, in] and has G = in / 16 scales per row. Gate and up of a stack of experts keep their
own number (quant/halves.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import Format, Part, Table, Unreadable, finite, parts_nbytes, refuse_other_values
from unfreeze.quant.mxfp4 import E2M1, pack_e2m1, round_to_e2m1, unpack_e2m1

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 16  # columns that share a scale; there is no other NVFP4
MAX_CODE = E2M1[-1]
MAX_SCALE = 448.0  # the largest float8_e4m3fn
LEAST_SCALE = 2.0**-9  # the smallest above 0, which modelopt writes for what would be 0
EMPTY = 0.125  # compressed-tensors' scale of a group of zeros


class Layout(NamedTuple):
    """name; the suffixes of codes and of the matrix's number, that number's shape, and whether it divides."""

    name: str
    codes: str
    whole: str
    shape: tuple[int, ...]
    divides: bool


PACKED = Layout("nvfp4-pack-quantized", "weight_packed", "weight_global_scale", (1,), divides=True)
MODELOPT = Layout("nvfp4", "weight", "weight_scale_2", (), divides=False)
SCALE = "weight_scale"


@dataclass(frozen=True)
class Nvfp4:
    """The codec. quant/codec.py says what each method promises. layout: PACKED or MODELOPT."""

    layout: Layout = PACKED
    variants: str = field(default="another group size", init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (self.layout.codes, SCALE, self.layout.whole)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """Codes uint8 [out, in / 2], scales float8_e4m3fn [out, G], the matrix's number float32.

        Raises ConfigError if in is not a multiple of 16.
        """
        if in_features % GROUP:
            raise ConfigError(
                f"{in_features} input columns do not divide into groups of {GROUP}, as NVFP4 needs",
                next="compare the layer's width in config.json with the checkpoint's publisher",
            )
        return {
            self.layout.codes: ("U8", (out_features, in_features // 2)),
            SCALE: ("F8_E4M3", (out_features, in_features // GROUP)),
            self.layout.whole: ("F32", self.layout.shape),
        }

    def as_stored(self, dtypes: Mapping[str, str]) -> Nvfp4:
        """The same: its parts have one dtype."""
        return self

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """None: all parts are kept."""
        return {}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in] with in = 16 G."""
        *leading, groups = parts[SCALE]
        return (*leading, groups * GROUP)

    def nbytes(self, out_features: int, in_features: int) -> int:
        """out * (in / 2 + in / 16) + 4."""
        return parts_nbytes(self.parts(out_features, in_features).values())

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The formula above -> [..., out, in], bf16 for PACKED and float32 for MODELOPT.

        Raises CheckpointError where the parts do not belong together.
        """
        import torch

        codes, scales, whole = (parts[suffix] for suffix in self.suffixes)
        *lead, rows, groups = scales.shape
        right = codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn
        if (
            not right
            or list(codes.shape) != [*lead, rows, groups * GROUP // 2]
            or list(whole.shape) != [*lead, *self.layout.shape]
        ):
            raise CheckpointError(
                f"{self.layout.codes} is {codes.dtype} {list(codes.shape)}; {groups} scales of {GROUP}"
                f" columns need torch.uint8 {[*lead, rows, groups * GROUP // 2]}, {self.layout.whole} is one"
                " number",
                next="get the checkpoint again: a tensor is truncated or in another format",
            )
        effective = self.effective(scales.float(), whole.reshape(*lead, 1, 1))
        weight = unpack_e2m1(codes).float().reshape(*scales.shape, GROUP)
        if not self.layout.divides:
            weight = weight + 0.0  # modelopt reads the code of -0.0 as 0.0
        weight = (weight * effective.unsqueeze(-1)).flatten(-2)
        return weight.bfloat16() if self.layout.divides else weight

    def effective(self, scales: Tensor, whole: Tensor) -> Tensor:
        """What a code is multiplied with: float32 [..., out, G]."""
        return scales / whole if self.layout.divides else scales * whole

    @property
    def rows_at(self) -> int:
        return 1

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        return {
            suffix: part if suffix == self.layout.whole else part[first:last]
            for suffix, part in parts.items()
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """The number for the matrix from its largest weight, a scale from each group's, the nearest codes.

        PACKED: number = 448 * 6 / absmax, scale = e4m3(number * (absmax of 16 / 6)), 0.125 for a group of
        zeros. MODELOPT: number = absmax / (6 * 448), scale = e4m3(absmax of 16 / (6 * number)), 1 for a group
        of zeros, and no less than 2 ** -9. Halves go to the even code.
        Source: compressed-tensors' generate_gparam, calculate_qparams and quantize; modelopt's NVFP4QTensor.
        Raises CheckpointError on a weight that is not finite.
        """
        import torch

        finite(weight)
        self.parts(weight.shape[-2], weight.shape[-1])
        lead, weight = weight.shape[:-2], weight.detach()
        grouped = weight.reshape(*weight.shape[:-1], -1, GROUP)
        absmax = grouped.abs().amax(dim=-1)
        largest = absmax.amax(dim=(-2, -1), keepdim=True)
        if self.layout.divides:
            least = torch.finfo(weight.dtype).tiny
            whole = (MAX_SCALE * MAX_CODE / largest.clamp(min=least)).nan_to_num(1.0, 1.0, 1.0).float()
            scales = (whole * (absmax / MAX_CODE)).clamp(max=MAX_SCALE).to(torch.float8_e4m3fn)
            scales = torch.where(scales.float() == 0, EMPTY, scales.float()).to(torch.float8_e4m3fn)
        else:
            whole = largest.float() / (MAX_CODE * MAX_SCALE)
            scales = absmax.float() / (MAX_CODE * whole)
            scales = torch.where(scales.nan_to_num(0.0) == 0, 1.0, scales)
            scales = scales.clamp(LEAST_SCALE, MAX_SCALE).to(torch.float8_e4m3fn)
        scaled = grouped / self.effective(scales.float(), whole).unsqueeze(-1)
        # + 0.0: both libraries give -0.0 the code of 0.0; a matrix of zeros divides 0 by 0 in modelopt's
        codes = round_to_e2m1(scaled.float().nan_to_num(0.0).flatten(-2) + 0.0)
        return {
            self.layout.codes: pack_e2m1(codes),
            SCALE: scales,
            self.layout.whole: whole.reshape((*lead, *self.layout.shape)),
        }


ONLY: dict[str, tuple[object, str]] = {
    "block_structure": ({}, "a scale for a block of rows and columns"),
    "zero_point": (False, "zero points"),
}
KNOWN = frozenset(
    "num_bits type symmetric strategy group_size dynamic actorder observer observer_kwargs scale_dtype"
    " zp_dtype".split()
)
"""Fields of compressed-tensors that are read, or without effect on weights that are packed already."""


def read_packed(where: str, weights: Table) -> Nvfp4:
    """The codec of the `weights` of one compressed-tensors group of format "nvfp4-pack-quantized".

    Raises Unreadable, naming it, for each variant that would be read wrongly.
    """
    refuse_other_values(weights, ONLY, f"{where}.weights")
    if weights.get("type") != "float" or weights.get("num_bits") != 4:
        raise Unreadable(f"{where}: {weights.get('type')} weights with num_bits {weights.get('num_bits')}")
    if weights.get("symmetric", True) is not True or weights.get("dynamic"):
        raise Unreadable(f"{where}: asymmetric or dynamic weights")
    if weights.get("strategy") != "tensor_group" or weights.get("group_size") != GROUP:
        raise Unreadable(
            f'{where}: strategy "{weights.get("strategy")}" with group_size {weights.get("group_size")!r:.60}'
        )
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise Unreadable(f"{where}: actorder {weights.get('actorder')!r:.60} (columns permuted by g_idx)")
    return Nvfp4(PACKED)


def read_modelopt(where: str, table: Table) -> Nvfp4:
    """The codec of modelopt's quant_algo "NVFP4" and "W4A16_NVFP4". Raises Unreadable for another group."""
    if table.get("group_size", GROUP) != GROUP:
        raise Unreadable(f"{where}: group_size {table.get('group_size')!r:.60}")
    return Nvfp4(MODELOPT)


FORMAT = (
    Format(
        "compressed-tensors nvfp4-pack-quantized",
        "nvfp4-pack-quantized",
        read_packed,
        KNOWN | ONLY.keys(),
        ("weight_packed", SCALE, "weight_global_scale"),
    ),
    Format("modelopt NVFP4", "modelopt NVFP4", read_modelopt, frozenset(), (SCALE, "weight_scale_2")),
    Format(
        "modelopt W4A16_NVFP4", "modelopt W4A16_NVFP4", read_modelopt, frozenset(), (SCALE, "weight_scale_2")
    ),
)
