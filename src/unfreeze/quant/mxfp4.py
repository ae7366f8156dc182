"""MXFP4: e2m1 codes with a power-of-two scale per 32 of them: gpt-oss's experts, compressed-tensors' mxfp4.

    w[o, i] = e2m1[code[o, i]] * 2 ** (scale[o, i // 32] - 127)          exact in bf16

A code is 4 bits: sign, then one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. A byte holds two, the lower half first, along
the input dim. A scale is one byte, the exponent alone (e8m0). A weight takes 17 / 32 byte, against 2 in bf16.
Nothing rounds: two significant binary digits times a power of two. Scale 255 is NaN in the specification and
no release has it. compressed-tensors reads it as infinity, and so does this file; transformers as 2 ** 128,
so that 0.0 and 0.5 times it are finite there.

The same bytes have three layouts on disk (`Mxfp4Names`), and keep theirs in memory.

Source: the OCP Microscaling specification 1.0; transformers' integrations/mxfp4 (blocks) and
compressed-tensors' MXFP4PackedCompressor (packed); bit-identical to both in tests/quant/test_mxfp4.py.

Shapes: a matrix is [out, in] and has G = in / 32 scales per row. The rows are those of the file: gpt-oss
publishes gate and up interleaved (even rows gate, odd rows up), and they keep this order in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from unfreeze.quant.codec import Format, Part, Table, finite, refuse_other_values
from unfreeze.quant.grids import at_once
from unfreeze.quant.scaled import (
    EXPONENTS,
    KNOWN,
    Kind,
    Scaled,
    as_exponents,
    by_exponents,
    exponents,
    refuse_weights,
    torch_name,
)

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32  # columns that share a scale; the specification has no other
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0 to 7; 8 to 15 are their negatives, 8 being -0.0."""
MAX_EXPONENT = 252  # the largest exponent whose largest value, 6 * 2 ** 125, is finite


class Mxfp4Names(NamedTuple):
    """name; the suffixes of codes and scales; True if codes are [out, G, 16] instead of [out, in / 2].

    dtype: of the codes on disk and in memory, U8 or I8; the same bytes
    """

    name: str
    codes: str
    scales: str
    blocked: bool
    dtype: str = "U8"


PACKED = Mxfp4Names("mxfp4-pack-quantized", "weight_packed", "weight_scale", blocked=False)
BLOCKS = Mxfp4Names("mxfp4", "blocks", "scales", blocked=True)
BESIDE = Mxfp4Names("mxfp4", "weight", "scale", blocked=False, dtype="I8")
"""Experts of DeepSeek-V4's FP8 releases (config.json: expert_dtype fp4)."""


def unpack_e2m1(packed: Tensor) -> Tensor:
    """packed uint8 [..., n] -> bf16 [..., 2 n], the lower half of each byte first; each value is exact."""
    import torch

    # look up both numbers of a byte in a table of 256 words
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.bfloat16, device=packed.device)
    byte = torch.arange(256, device=packed.device)
    words = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).view(torch.int32).flatten()
    # index_select takes a fifth of the time of an index in brackets
    values_of_bytes = words.index_select(0, packed.flatten().int()).view(torch.bfloat16)
    return values_of_bytes.view(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_e2m1(codes: Tensor) -> Tensor:
    """codes uint8 [..., 2 n] in 0..15 -> uint8 [..., n], the first of a pair in the lower half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def round_to_e2m1(values: Tensor) -> Tensor:
    """float32 -> codes uint8 of the nearest e2m1; half-way to the even code, beyond 6 to 6.

    The sign is kept if the number becomes 0. compressed-tensors does so as well, except for -0.0 itself.
    """
    import torch

    # half-way between neighbours; if the upper one is even, the tie is moved below the boundary
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    ties[1::2] = torch.nextafter(ties[1::2], torch.zeros_like(ties[1::2]))
    codes = torch.bucketize(values.abs(), ties, out_int32=True).to(torch.uint8)
    return codes | (values.signbit().to(torch.uint8) << 3)


def powers_of_two(scales: Tensor) -> Tensor:
    """scales of one byte -> bf16 2 ** (scale - 127): the exponent's bits; 0 becomes a subnormal."""
    import torch

    bits = scales.view(torch.uint8).to(torch.int16) << 7
    return torch.where(bits == 0, 1 << 6, bits).view(torch.bfloat16)


@dataclass(frozen=True)
class Mxfp4(Scaled):
    """The codec. quant/codec.py documents each method.

    names        PACKED or BLOCKS
    scale_dtype  dtype of the scales in the files and in memory: U8 or F8_E8M0, the same byte
    """

    kind: ClassVar[Kind] = Kind("MXFP4", "another group size", EXPONENTS)
    names: Mxfp4Names = PACKED
    scale_dtype: str = "U8"
    group: int = field(default=GROUP, init=False, repr=False)

    @property
    def name(self) -> str:
        return self.names.name

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (self.names.codes, self.names.scales)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """Codes uint8 [out, in / 2], or [out, G, 16] in BLOCKS; scales [out, G].

        Raises ConfigError if in is not a multiple of 32.
        """
        groups = self.groups(in_features)
        width = (groups, GROUP // 2) if self.names.blocked else (in_features // 2,)
        return {
            self.names.codes: (self.names.dtype, (out_features, *width)),
            self.names.scales: (self.scale_dtype, (out_features, groups)),
        }

    def laid_out(self, packed: Tensor) -> Tensor:
        """Codes uint8 [..., out, G, 16] in their shape and dtype on disk."""
        codes = packed if self.names.blocked else packed.flatten(-2)
        return codes.view(torch_name(self.names.dtype))

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = e2m1[code] * 2 ** (scale - 127) -> bf16 [..., out, in], exact.

        Raises CheckpointError if codes and scales do not belong together.
        """
        import torch

        shape = self.compare(parts)
        codes, scales = parts[self.names.codes].view(torch.uint8), parts[self.names.scales]
        # some groups at a time, which keeps temporaries small
        bytes_G, scales_G = codes.reshape(-1, GROUP // 2), scales.reshape(-1, 1)
        weight = torch.empty(len(scales_G), GROUP, dtype=torch.bfloat16, device=codes.device)
        step = at_once(codes) // GROUP
        for first in range(0, len(scales_G), step):
            some = slice(first, first + step)
            torch.mul(unpack_e2m1(bytes_G[some]), powers_of_two(scales_G[some]), out=weight[some])
        return weight.view(shape)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """scale = the largest's power of two / 4 per 32 columns, code = the nearest e2m1, half to even.

        That power of two is the next one if the largest has a mantissa of 1.75 or more, so that clipping
        never exceeds rounding. A group of zeros has scale 0.
        Source: compressed-tensors' generate_mx_scales and cast_to_fp4; bit-identical to them. From 1.75 * 2
        ** 127 on they write the scale of 1; here such a number becomes 6 * 2 ** 125.

        quantize(dequantize(p)) represents the same numbers as p, bit for bit, if no scale is 255. Raises
        CheckpointError on a weight that is not finite.
        """
        finite(weight)
        grouped = weight.detach().float().reshape(*weight.shape[:-1], self.groups(weight.shape[-1]), GROUP)
        scales = exponents(grouped.abs().amax(dim=-1), 2, MAX_EXPONENT)
        packed = pack_e2m1(round_to_e2m1(by_exponents(grouped, scales)))
        return {
            self.names.codes: self.laid_out(packed),
            self.names.scales: as_exponents(scales, self.scale_dtype),
        }


def read_packed(where: str, weights: Table) -> Mxfp4:
    """The codec of the `weights` of one compressed-tensors group of format "mxfp4-pack-quantized"."""
    refuse_weights(where, weights, 4, ("group",), GROUP)
    return Mxfp4(PACKED)


def read_blocks(where: str, table: Table) -> Mxfp4:
    """The codec of a quantization_config with quant_method "mxfp4", as gpt-oss has it."""
    refuse_other_values(table, {"config_groups": ({}, "groups of modules in other formats")}, where)
    return Mxfp4(BLOCKS)


FORMAT = (
    Format(
        key="mxfp4",
        title="MXFP4 as gpt-oss publishes it",
        read=read_blocks,
        known=frozenset("modules_to_not_convert dequantize".split()),
        suffixes=("blocks", "scales"),
    ),
    Format(
        key="compressed-tensors mxfp4-pack-quantized",
        title="mxfp4-pack-quantized",
        read=read_packed,
        known=KNOWN,
        suffixes=("weight_packed", "weight_scale"),
    ),
)
