"""FP8 e4m3 with one scale for a matrix, or one for each of its rows.

    w[o, i] = code[o, i] * scale            or * scale[o]            one rounding, to the dtype of the scales

Codes are float8_e4m3fn, a scale is float32, bf16 or float16. The writers, and the scale on disk:

- compressed-tensors "float-quantized" and "naive-quantized": weight_scale [1], or [out, 1] per row
- NVIDIA's modelopt "FP8": weight_scale [], and "FP8_PER_CHANNEL_PER_TOKEN": [out]
- quant_method "fp8" without weight_block_size: weight_scale_inv or weight_scale []; either multiplies

A weight takes 1 byte. The files also have scales of activations (input_scale, activation_scale), which are
not used: a server rounds activations with them, training here does not.

Source: compressed-tensors and modelopt; bit-identical to both in tests/quant/test_fp8_scaled.py.

Shapes: a matrix is [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from unfreeze.quant import fp8
from unfreeze.quant.codec import Codec, Format, Part, Table, finite
from unfreeze.quant.scaled import KNOWN, MAX_E4M3, Kind, Scaled, nonzero, refuse_weights, to_e4m3

if TYPE_CHECKING:
    from torch import Tensor

MATRIX, ONE, ROWS, COLUMN = (), (1,), ("out",), ("out", 1)
"""Shapes of scales on disk: a scalar, a list of one, one per row, and one per row as a column."""


@dataclass(frozen=True)
class Fp8Scaled(Scaled):
    """The codec. quant/codec.py documents each method.

    scales       the shape of the scales: MATRIX or ONE for a whole matrix, ROWS or COLUMN for each row
    scale        their last name part
    scale_dtype  their dtype, in the files and in memory alike
    """

    kind: ClassVar[Kind] = Kind(
        "FP8", "another strategy", compare="compare the strategy in quantization_config with the publisher's"
    )
    scales: tuple[str | int, ...] = COLUMN
    scale: str = "weight_scale"
    scale_dtype: str = "F32"

    @property
    def name(self) -> str:
        return "fp8-channel" if "out" in self.scales else "fp8-tensor"

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("weight", self.scale)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """weight float8_e4m3fn [out, in], and the scales."""
        shape = tuple(out_features if extent == "out" else 1 for extent in self.scales)
        return {"weight": ("F8_E4M3", (out_features, in_features)), self.scale: (self.scale_dtype, shape)}

    def as_stored(self, dtypes: Mapping[str, str]) -> Fp8Scaled:
        """This codec with the dtype of the files' scales; for one scale per matrix also their name there."""
        for scale in ("weight_scale", "weight_scale_inv") if self.scales == MATRIX else ():
            if self.scales_in(dtypes, scale):
                return super(Fp8Scaled, replace(self, scale=scale)).as_stored(dtypes)
        return super().as_stored(dtypes)

    def rows_each(self, suffix: str) -> int:
        return 1 if suffix != self.scale or "out" in self.scales else 0

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = code * scale -> [..., out, in] in the dtype of the scales; codes are exact in each of them.

        Raises CheckpointError if codes and scales do not belong together.
        """
        *lead, out_features, _ = self.compare(parts)
        scales, rows = parts[self.scale], out_features if "out" in self.scales else 1
        return parts["weight"].to(scales.dtype) * scales.reshape(*lead, rows, 1)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """scale = absmax / 448 of the matrix or row, code = e4m3(w / scale), in the dtype of the weight.

        If all weights are zero the scale is that dtype's epsilon.
        Source: compressed-tensors' calculate_qparams. Raises CheckpointError on a weight that is not finite.
        """
        finite(weight)
        weight = weight.detach()
        absmax = weight.abs().amax(dim=-1, keepdim=True)
        if "out" not in self.scales:
            absmax = absmax.amax(dim=-2, keepdim=True)
        scale = nonzero(absmax / MAX_E4M3)
        shape = self.parts(*weight.shape[-2:])[self.scale][1]
        return {"weight": to_e4m3(weight / scale), self.scale: scale.reshape((*weight.shape[:-2], *shape))}


def read_float(where: str, weights: Table) -> Codec:
    """The codec of the `weights` of one compressed-tensors group of format "float-quantized".

    Also of "naive-quantized", if its weights are FP8. Raises Unreadable for what would be read wrongly.
    """
    strategy = refuse_weights(where, weights, 8, ("tensor", "channel", "block"))
    if strategy != "block":
        return Fp8Scaled({"tensor": ONE, "channel": COLUMN}[strategy])
    block = weights.get("block_structure")
    if isinstance(block, str):  # older releases write "128x128"
        block = [int(side) if side.isdecimal() else side for side in block.split("x")]
    return fp8.Fp8(fp8.block_size(block, f"{where}: block_structure"), scale="weight_scale")


def read_method(where: str, table: Table) -> Codec:
    """The codec of a quantization_config with quant_method "fp8": a scale for each block, or for a matrix.

    Raises Unreadable naming each variant that would be read wrongly.
    """
    if table.get("weight_block_size") is not None:
        return fp8.read(where, table)
    fp8.refuse_variants(where, table)
    return Fp8Scaled(MATRIX, scale="weight_scale_inv")


def read_modelopt(where: str, table: Table) -> Fp8Scaled:
    """The codec of modelopt's quant_algo "FP8": one scale for a matrix."""
    return Fp8Scaled(MATRIX)


def read_modelopt_channel(where: str, table: Table) -> Fp8Scaled:
    """The codec of modelopt's quant_algo "FP8_PER_CHANNEL_PER_TOKEN": one scale for each row."""
    return Fp8Scaled(ROWS)


_SUFFIXES = ("weight_scale", "weight_scale_inv")
FORMAT = (
    Format(
        "fp8", "FP8 e4m3 with scales for blocks or for a matrix", read_method, fp8.FIELDS, _SUFFIXES[::-1]
    ),
    Format(
        "compressed-tensors float-quantized",
        "compressed-tensors float-quantized, FP8",
        read_float,
        KNOWN,
        _SUFFIXES,
    ),
    Format("modelopt FP8", "modelopt FP8", read_modelopt, frozenset(), _SUFFIXES),
    Format(
        "modelopt FP8_PER_CHANNEL_PER_TOKEN",
        "modelopt FP8 with a scale per row",
        read_modelopt_channel,
        frozenset(),
        _SUFFIXES,
    ),
)
