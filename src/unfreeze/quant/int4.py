"""INT4 "pack-quantized", symmetric, with group scales: the format of Kimi-K2-Thinking's experts.

    w[o, i] = (nibble[o, i] - 8) * scale[o, i // group]            one rounding, to the dtype of the scales

A group is `group` consecutive input columns of one row. An int32 holds eight nibbles, lowest bits first,
along the input dim. A nibble is its code + 8 (offset binary, not two's complement). At group 32 a weight
takes 0.5625 byte, against 2 in bf16.

Source: compressed-tensors "pack-quantized"; bit-identical to it in tests/quant/test_int4.py.

Shapes: a matrix is [out, in] and has G = in / group scales per row. Bytes are read as little-endian, like
every machine torch runs on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from unfreeze.core.dtypes import FLOATS
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import Part, parts_nbytes

if TYPE_CHECKING:
    from torch import Tensor

PER_WORD = 8  # nibbles in an int32
OFFSET = 8  # stored nibble = code + 8
MAX_GROUP = 2**20  # columns that share a scale; more than any layer's width
SUFFIXES = ("weight_packed", "weight_scale", "weight_shape")
GRID_MAX = 7  # Kimi's grid uses codes -7..7: symmetric, so that scale = absmax / 7

# The largest scale s for which bf16(7 s) is finite. The next one is 146 * 2**118, and 146 * 7 = 1022 would
# round up to 1024 * 2**118, infinity.
MAX_SCALE = 145.0 * 2.0**118


def pack_int4(codes: Tensor) -> Tensor:
    """codes int8 [..., in] in -8..7 -> int32 [..., ceil(in / 8)].

    Element i is at bits 4 (i mod 8) of its word; unused bits of the last word are 0.
    Source: compressed-tensors pack_to_int32 (num_bits 4).
    """
    import torch

    nibbles = (codes + OFFSET).view(torch.uint8)
    missing = -nibbles.shape[-1] % PER_WORD
    if missing:
        nibbles = torch.nn.functional.pad(nibbles, (0, missing))
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).contiguous().view(torch.int32)


def unpack_int4(packed: Tensor, in_features: int) -> Tensor:
    """packed int32 [..., ceil(in / 8)] -> codes int8 [..., in] in -8..7.

    Source: compressed-tensors unpack_from_int32 (num_bits 4).
    """
    import torch

    two_nibbles = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((two_nibbles & 0xF, two_nibbles >> 4), dim=-1).flatten(-2)
    return nibbles.view(torch.int8)[..., :in_features] - OFFSET


@dataclass(frozen=True)
class Int4:
    """The codec. quant/codec.py documents each method.

    group_size   columns that share one scale.
    scale_dtype  dtype of the scales, in the files and in memory alike: rounding a scale to another dtype
                 would change every weight of its group. BF16 in Kimi's releases, F16 or F32 from other
                 writers; `quantize` makes BF16.
    """

    group_size: int = 32
    scale_dtype: str = "BF16"
    name: str = field(default="int4-pack-quantized", init=False, repr=False)
    suffixes: tuple[str, ...] = field(default=SUFFIXES, init=False, repr=False)
    variants: str = field(
        default="another group_size or another nibble format", init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group_size is {self.group_size}; it must be at least 1")

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """weight_packed int32 [out, ceil(in/8)], weight_scale [out, in/group].

        Raises ConfigError if in is not a multiple of group_size.
        """
        if in_features % self.group_size:
            raise ConfigError(
                f"{in_features} input columns do not divide into groups of {self.group_size}"
                " (quantization_config group_size)",
                next=(
                    "compare group_size and the layer's width in config.json with the checkpoint's publisher"
                ),
            )
        return {
            "weight_packed": ("I32", (out_features, -(-in_features // PER_WORD))),
            "weight_scale": (self.scale_dtype, (out_features, in_features // self.group_size)),
        }

    def as_stored(self, dtypes: Mapping[str, str]) -> Int4:
        """This codec with the scale_dtype of the files. Only scales with codes beside them count."""
        first: dict[str, str] = {}
        for name, dtype in dtypes.items():
            base, _, suffix = name.rpartition(".")
            if suffix == "weight_scale" and dtype in FLOATS and f"{base}.weight_packed" in dtypes:
                first.setdefault(dtype, name)
        if len(first) > 1:
            named = ", ".join(f"{name} is {dtype}" for dtype, name in first.items())
            raise CheckpointError(
                f"the scales of packed weights have {len(first)} dtypes: {named}",
                next="convert them to the widest of these",
            )
        return replace(self, scale_dtype=next(iter(first))) if first else self

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """weight_shape = [out, in]."""
        return {"weight_shape": (out_features, in_features)}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in] with in = G * group_size.

        The packed width alone does not tell how many codes its last word holds.
        """
        *leading, groups = parts["weight_scale"]
        return (*leading, groups * self.group_size)

    def nbytes(self, out_features: int, in_features: int) -> int:
        """out * (4 * ceil(in/8) + scale_dtype's size * in/group)."""
        return parts_nbytes(self.parts(out_features, in_features).values())

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = (nibble - 8) * scale -> [..., out, in] in the dtype of the scales, one rounding.

        Codes are exact in bf16, and a bf16 product is computed in float32 and rounded once. Raises
        CheckpointError if packed width and number of scales disagree (a truncated tensor, another group size
        or another nibble format).
        """
        import torch

        packed, scale = parts["weight_packed"], parts["weight_scale"]
        in_features = scale.shape[-1] * self.group_size
        needed = [*scale.shape[:-1], -(-in_features // PER_WORD)]
        if packed.dtype != torch.int32 or list(packed.shape) != needed:
            raise CheckpointError(
                f"weight_packed is {packed.dtype} {list(packed.shape)}; {scale.shape[-1]} scales of group"
                f" {self.group_size} need torch.int32 {needed}",
                next=(
                    "compare quantization_config.group_size with the publisher's: the tensor is truncated or"
                    " in another format"
                ),
            )
        codes = unpack_int4(packed, in_features).to(scale.dtype).reshape(*scale.shape, self.group_size)
        return (codes * scale.unsqueeze(-1)).flatten(-2)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Kimi's grid: scale = bf16(absmax / 7) per group, code = round(w / scale) in -7..7.

        weight [..., out, in] bf16 or float32 -> weight_packed, weight_scale. An all-zero group gets scale 0.
        For the same scale the codes equal compressed-tensors': both divide in the dtype of the weight.

        quantize(dequantize(p)) == p, bit for bit, for every p from this quantizer; and for any group whose
        codes are in -7..7 and reach ±7, whatever its bf16 scale (tested for all scales, including subnormals
        and the largest). `_exact_neighbour` explains why plain absmax / 7 would break that. Raises
        CheckpointError on a weight that is not finite.
        """
        import torch

        self.parts(weight.shape[-2], weight.shape[-1])
        grouped = weight.detach().reshape(
            *weight.shape[:-1], weight.shape[-1] // self.group_size, self.group_size
        )
        absmax = grouped.abs().amax(dim=-1).float()
        if not bool(absmax.isfinite().all()):
            bad = int((~weight.isfinite()).sum())
            raise CheckpointError(
                f"{bad} of {weight.numel()} weights are NaN or infinite and cannot be quantized"
            )
        scale = (absmax / GRID_MAX).clamp(max=MAX_SCALE).to(torch.bfloat16)
        codes = _codes(grouped, scale)
        _exact_neighbour(grouped, absmax, scale, codes)
        return {"weight_packed": pack_int4(codes.flatten(-2)), "weight_scale": scale}


def _codes(grouped: Tensor, scale: Tensor) -> Tensor:
    """round(w / scale), half to even, in -7..7; 0 if the scale is 0.

    grouped [..., G, group], scale [..., G] -> int8 [..., G, group].
    """
    import torch

    divisor = torch.where(scale == 0, 1, scale).unsqueeze(-1)
    codes = (grouped / divisor).round_().clamp_(-GRID_MAX, GRID_MAX)
    return codes.masked_fill_((scale == 0).unsqueeze(-1), 0).to(torch.int8)


def _exact_neighbour(grouped: Tensor, absmax: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Replace bf16(absmax / 7) by a neighbouring bf16 scale if only that one reproduces the group.

    grouped [..., G, group], absmax [..., G]; scale [..., G] and codes [..., G, group] are changed in place.

    Why: absmax of a dequantized group is bf16(7 s). Let s = m * 2^e with 128 <= m <= 255. Then absmax / 7 is
    |bf16(7 m) - 7 m| / 7 steps of bf16 away from s:

    - at most 2/7 for m <= 146, and 3/7 above: both under 1/2, so rounding finds s;
    - 4/7 if 7 m is half-way between two bf16 numbers (m >= 148, m = 4 mod 8): s comes back one step off.

    Scales made as bf16(absmax / 7) from bf16 weights never take those values (they would need |m - 8 n /
    7| = 4/7 for an integer n). Scales from float32 weights or other writers do. Subnormal scales (below
    2^-126) have so few steps that the largest code of a group may be 6. For an absmax of 25, 26, 32 or 39
    steps, 6 s / 7 then does not round to s.
    """
    import torch

    for step in (-1, 1):
        # groups whose absmax equals the largest code times the neighbouring scale
        alternative = (scale.view(torch.int16) + step).view(torch.bfloat16)
        code = (absmax / alternative.float()).round().clamp(max=GRID_MAX)  # 7, except among subnormal numbers
        largest = (code * alternative.float()).to(torch.bfloat16)
        candidates = ((largest == absmax) & (scale > 0)).nonzero(as_tuple=True)
        if candidates[0].numel() == 0:
            continue

        # of these, those exact with the neighbour but not without it
        weights, neighbour = grouped[candidates], alternative[candidates]
        codes_neighbour, codes_here = _codes(weights, neighbour), codes[candidates]
        exact_neighbour = _expanded(codes_neighbour, neighbour).eq(weights).all(dim=-1)
        exact_here = _expanded(codes_here, scale[candidates]).eq(weights).all(dim=-1)
        better = exact_neighbour & ~exact_here
        chosen = tuple(index[better] for index in candidates)
        scale[chosen] = neighbour[better]
        codes[chosen] = codes_neighbour[better]


def _expanded(codes: Tensor, scale: Tensor) -> Tensor:
    """bf16(code * scale): codes [N, group], scale bf16 [N] -> [N, group]."""
    return codes.to(scale.dtype) * scale.unsqueeze(-1)
