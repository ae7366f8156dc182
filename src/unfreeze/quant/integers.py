"""Integer codes of 2, 4 or 8 bits with scales, as compressed-tensors writes them, beyond what Int4 reads.

    w[o, i] = (code[o, i] - zero[o, g]) * scale[o, g]               one rounding, to the dtype of the scales

Codes are signed, from -2 ** (bits - 1). g is i // group_size, or 0 if a row or the whole matrix has one
scale. With act-order g is g_idx[i]: columns were grouped by their activations, and weight_g_idx stores the
group of each. Without zero points (symmetric) zero is 0. Two layouts on disk, which are kept in memory:

- "pack-quantized": weight_packed int32, 32 / bits codes in a word, lowest bits first, each stored as
  code + 2 ** (bits - 1); zero points packed the same way, but along the output dim:
  [ceil(out * bits / 32), G]
- "int-quantized": weight int8 [out, in], zero points int8 beside the scales

Four bits, symmetric, in groups and without act-order is quant/int4.py, which the kernels read.

Source: compressed-tensors; bit-identical to it in tests/quant/test_integers.py.

Shapes: a matrix is [out, in] and has G scales per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unfreeze.core.errors import ConfigError
from unfreeze.quant import fp8_scaled, int4
from unfreeze.quant.codec import Codec, Format, Part, Table, Unreadable, finite, refuse_other_values
from unfreeze.quant.scaled import KNOWN, ONLY, Kind, Scaled, nonzero

if TYPE_CHECKING:
    from torch import Tensor

WORD = 32  # bits
ROW, MATRIX = 0, -1
"""Special group sizes: one scale for a row, or for the matrix."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes int8 [..., n] -> int32 [..., ceil(n * bits / 32)], each as code + 2 ** (bits - 1).

    The lowest bits of a word come first; unused bits are 0. Source: compressed-tensors' pack_to_int32.
    """
    import torch

    per_word = WORD // bits
    stored = codes.to(torch.int32) + (1 << (bits - 1))
    missing = -stored.shape[-1] % per_word
    if missing:
        stored = torch.nn.functional.pad(stored, (0, missing))
    words = stored.reshape(*stored.shape[:-1], -1, per_word) << _shifts(bits, codes)
    return words.sum(dim=-1, dtype=torch.int32)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [..., ceil(count * bits / 32)] -> codes int8 [..., count]."""
    import torch

    stored = (words.unsqueeze(-1) >> _shifts(bits, words)) & ((1 << bits) - 1)
    return (stored.flatten(-2)[..., :count] - (1 << (bits - 1))).to(torch.int8)


def _shifts(bits: int, like: Tensor) -> Tensor:
    import torch

    return torch.arange(0, WORD, bits, dtype=torch.int32, device=like.device)


@dataclass(frozen=True)
class Integers(Scaled):
    """The codec. quant/codec.py documents each method.

    bits         of a code: 2, 4 or 8
    group        columns that share one scale; ROW, MATRIX
    zeros        True if there are zero points
    permuted     True if there is a weight_g_idx
    packed       "pack-quantized", otherwise "int-quantized"
    scale_dtype  dtype of the scales, in the files and in memory alike
    """

    kind: ClassVar[Kind] = Kind(
        "a format of integers",
        "another group_size or another num_bits",
        compare="compare group_size and num_bits in quantization_config with the publisher's",
    )
    bits: int = 4
    group: int = 128
    zeros: bool = False
    permuted: bool = False
    packed: bool = True
    scale_dtype: str = "BF16"

    @property
    def name(self) -> str:
        return f"int{self.bits}-{'pack-' if self.packed else ''}quantized"

    @property
    def codes(self) -> str:
        """The last name part of the codes."""
        return "weight_packed" if self.packed else "weight"

    @property
    def suffixes(self) -> tuple[str, ...]:
        zeros = ("weight_zero_point",) if self.zeros else ()
        order = ("weight_g_idx",) if self.permuted else ()
        shape = ("weight_shape",) if self.packed else ()
        return (self.codes, "weight_scale", *zeros, *order, *shape)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """Codes, scales [out, G] or [1], zero points, g_idx int32 [in].

        Raises ConfigError if in is not a multiple of the group, or does not fill whole words.
        """
        per_word = WORD // self.bits
        if self.packed and self.group <= 0 and in_features % per_word:
            raise ConfigError(
                f"{in_features} input columns of {self.bits} bits do not fill whole 32-bit words",
                next="compare num_bits and the layer's width in config.json with the publisher's",
            )
        groups = self.groups(in_features) if self.group > 0 else 1
        scales = (1,) if self.group == MATRIX else (out_features, groups)
        parts: dict[str, Part] = (
            {"weight_packed": ("I32", (out_features, -(-in_features // per_word)))}
            if self.packed
            else {"weight": ("I8", (out_features, in_features))}
        )
        parts["weight_scale"] = (self.scale_dtype, scales)
        if self.zeros:
            packed: Part = ("I32", (-(-out_features // per_word), groups))
            parts["weight_zero_point"] = packed if self.packed else ("I8", scales)
        if self.permuted:
            parts["weight_g_idx"] = ("I32", (in_features,))
        return parts

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """weight_shape = [out, in] beside packed codes."""
        return {"weight_shape": (out_features, in_features)} if self.packed else {}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in]."""
        if self.packed and self.group <= 0:
            codes = parts[self.codes]
            return (*codes[:-1], codes[-1] * (WORD // self.bits))
        return super().shape(parts)

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = (code - zero) * scale -> [..., out, in] in the dtype of the scales.

        A difference of two codes is exact in bf16, so there is one rounding. Raises CheckpointError if the
        parts do not belong together.
        """
        out_features, in_features = self.compare(parts)[-2:]
        codes, scale = parts[self.codes], parts["weight_scale"]
        values = unpack(codes, self.bits, in_features) if self.packed else codes
        zeros = self._zeros(parts, out_features)
        if self.group == MATRIX:
            scale, zeros = ((None if part is None else part.unsqueeze(-1)) for part in (scale, zeros))
        assert scale is not None
        if self.permuted:
            return _columns(values, zeros, scale, parts["weight_g_idx"])
        grouped = values.reshape(*values.shape[:-1], scale.shape[-1], -1).to(scale.dtype)
        if zeros is not None:
            grouped = grouped - zeros.unsqueeze(-1).to(scale.dtype)
        return (grouped * scale.unsqueeze(-1)).flatten(-2)

    def _zeros(self, parts: Mapping[str, Tensor], out_features: int) -> Tensor | None:
        """Zero points int8 in the shape of the scales, None if there are none."""
        if not self.zeros:
            return None
        zeros = parts["weight_zero_point"]
        if not self.packed:
            return zeros
        return unpack(zeros.transpose(-1, -2), self.bits, out_features).transpose(-1, -2)

    @property
    def rows_at(self) -> int:
        return WORD // self.bits  # rows whose zero points share a word

    def rows_each(self, suffix: str) -> int:
        if suffix == "weight_g_idx" or (self.group == MATRIX and suffix != self.codes):
            return 0
        return self.rows_at if suffix == "weight_zero_point" and self.packed else 1

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Codes as the nearest multiples of a scale, from the min and max weight of a group.

        Symmetric: scale = absmax / (2 ** bits - 1) * 2; otherwise scale = (max - min) / (2 ** bits - 1) and
        zero = round(lowest code - min / scale), with min <= 0 <= max. A scale of 0 becomes the dtype's
        epsilon. Computed in the dtype of the weight; with act-order columns keep their order, as there are no
        activations to order them by.
        Source: compressed-tensors' calculate_qparams and quantize. Raises CheckpointError on a weight that is
        not finite.
        """
        import torch

        finite(weight)
        needed = self.parts(*weight.shape[-2:])
        lead, low, high = weight.shape[:-2], -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        groups = needed["weight_scale"][1][-1] if self.group >= 0 else 1
        grouped = weight.detach().reshape(*weight.shape[:-1], groups, -1)
        over = (-3, -1) if self.group == MATRIX else (-1,)
        least, most = (
            grouped.amin(over, keepdim=True).clamp(max=0),
            grouped.amax(over, keepdim=True).clamp(min=0),
        )
        if self.zeros:
            scale = (most - least) / (high - low)
            zero = (low - least / scale).clamp(low, high)
        else:
            scale, zero = torch.maximum(least.abs(), most.abs()) / ((high - low) / 2), None
        scale = nonzero(scale)
        zero = None if zero is None else zero.nan_to_num(0.0).round().to(torch.int8)
        scaled = grouped / scale if zero is None else grouped / scale + zero.to(weight.dtype)
        codes = scaled.clamp(low, high).round().to(torch.int8).flatten(-2)
        parts = {
            self.codes: pack(codes, self.bits) if self.packed else codes,
            "weight_scale": scale.reshape(*lead, *needed["weight_scale"][1]),
        }
        if zero is not None:
            zero = zero.reshape(*lead, *needed["weight_scale"][1])
            if self.packed:
                zero = pack(zero.transpose(-1, -2), self.bits).transpose(-1, -2).contiguous()
            parts["weight_zero_point"] = zero
        if self.permuted:
            order = torch.arange(weight.shape[-1], dtype=torch.int32, device=weight.device) // self.group
            parts["weight_g_idx"] = order.expand(*lead, -1).contiguous()
        return parts


def _columns(values: Tensor, zeros: Tensor | None, scale: Tensor, group_of: Tensor) -> Tensor:
    """(values - zeros) * scale, where column i of a matrix has the group group_of[i].

    values int8 [..., out, in], zeros and scale [..., out, G], group_of int32 [..., in].
    """
    index = group_of.long().unsqueeze(-2).expand(values.shape)
    weight = values.to(scale.dtype)
    if zeros is not None:
        weight = weight - zeros.to(scale.dtype).gather(-1, index)
    return weight * scale.gather(-1, index)


def read_packed(where: str, weights: Table) -> Codec:
    """The codec of the `weights` of one compressed-tensors group of format "pack-quantized"."""
    codec = _read(where, weights, packed=True)
    plain = codec.bits == 4 and codec.group > 0 and not codec.zeros and not codec.permuted
    return int4.Int4(codec.group) if plain else codec


def read_plain(where: str, weights: Table) -> Codec:
    """The codec of one group of format "int-quantized", or of "naive-quantized", which may also be FP8."""
    if weights.get("type") == "float":
        return fp8_scaled.read_float(where, weights)
    return _read(where, weights, packed=False)


def _strategy(size: object) -> str:
    """The strategy that compressed-tensors assumes if it is absent, by the group size."""
    if size is None:
        return "tensor"
    return "channel" if size == -1 else "group"


def _read(where: str, weights: Table, *, packed: bool) -> Integers:
    """The codec of `weights`. Raises Unreadable naming each variant that would be read wrongly."""
    refuse_other_values(weights, ONLY, f"{where}.weights")
    bits, strategy = weights.get("num_bits"), weights.get("strategy") or _strategy(weights.get("group_size"))
    kind = weights.get("type", "int")
    if kind != "int" or not isinstance(bits, int) or bits not in ((2, 4, 8) if packed else (8,)):
        raise Unreadable(f"{where}: {kind} weights with num_bits {bits}")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise Unreadable(f"{where}: symmetric = {symmetric!r:.60}")
    if weights.get("dynamic"):
        raise Unreadable(f"{where}: dynamic weight quantization")
    if strategy == "group":
        group = weights.get("group_size")
        if not isinstance(group, int) or isinstance(group, bool) or not 1 <= group <= int4.MAX_GROUP:
            raise Unreadable(f"{where}: group_size {group!r:.60}")
    elif strategy in ("channel", "tensor"):
        group = ROW if strategy == "channel" else MATRIX
    else:
        raise Unreadable(f'{where}: strategy "{strategy}"')
    if group == MATRIX and packed and not symmetric:
        raise Unreadable(f"{where}: packed weights with one zero point for a matrix")
    # actorder "weight" (or "static") reorders columns during calibration only; the layout on disk is the
    # usual one. "group" (True in old files) stores the group of each column, g_idx
    order = weights.get("actorder")
    if order not in (None, False, True, "weight", "static", "group"):
        raise Unreadable(f"{where}: actorder {order!r:.60}")
    permuted = order in (True, "group")
    if permuted and (group <= 0 or not packed):
        raise Unreadable(f"{where}: actorder {order!r} without packed groups")
    return Integers(bits, group, zeros=not symmetric, permuted=permuted, packed=packed)


FORMAT = (
    Format(
        "compressed-tensors pack-quantized",
        "compressed-tensors pack-quantized",
        read_packed,
        KNOWN,
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    ),
    Format(
        "compressed-tensors int-quantized",
        "int-quantized",
        read_plain,
        KNOWN,
        ("weight_scale", "weight_zero_point"),
    ),
    Format(
        "compressed-tensors naive-quantized",
        "naive-quantized",
        read_plain,
        KNOWN,
        ("weight_scale", "weight_zero_point"),
    ),
)
