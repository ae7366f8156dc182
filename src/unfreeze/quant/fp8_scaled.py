"""FP8 e4m3 with one scale for a matrix, or one for each of its rows.

    w[o, i] = code[o, i] * scale            or * scale[o]            one rounding, to the dtype of the scales

Codes are float8_e4m3fn, a scale is float32, bf16 or float16. Who writes it, and how the scale lies on disk:
- compressed-tensors "float-quantized" and "naive-quantized": weight_scale [1], or [out, 1] per row
- NVIDIA's modelopt "FP8": weight_scale [], and "FP8_PER_CHANNEL_PER_TOKEN": [out]
- quant_method "fp8" without weight_block_size: weight_scale_inv or weight_scale []; either multiplies

A weight takes 1 byte. Scales of activations (input_scale, activation_scale) lie beside and are not used: a
server rounds activations with them, training here rounds none.
Source: compressed-tensors and modelopt; equal to both bit for bit in tests/quant/test_fp8_scaled.py.

Shapes: a matrix is [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from unfreeze.core.dtypes import FLOATS
from unfreeze.core.errors import CheckpointError
from unfreeze.quant import fp8
from unfreeze.quant.codec import (
    Codec,
    Format,
    Part,
    Table,
    Unreadable,
    finite,
    one_scale_dtype,
    parts_nbytes,
    refuse_other_values,
)

if TYPE_CHECKING:
    from torch import Tensor

MAX_CODE = fp8.MAX_CODE
MATRIX, ONE, ROWS, COLUMN = (), (1,), ("out",), ("out", 1)
"""Shapes of scales on disk: a number, a list of one, a number per row, and that as a column."""


@dataclass(frozen=True)
class Fp8Scaled:
    """The codec. quant/codec.py says what each method promises.

    scales       the shape of the scales: MATRIX or ONE for a whole matrix, ROWS or COLUMN for each row
    scale        their last name part
    scale_dtype  their dtype, in the files and in memory alike
    """

    scales: tuple[str | int, ...] = COLUMN
    scale: str = "weight_scale"
    scale_dtype: str = "F32"
    variants: str = field(default="another strategy", init=False, repr=False, compare=False)

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
        """This codec with the dtype of the files' scales; of one per matrix also the name they have there."""
        names = {"weight_scale", "weight_scale_inv"} if self.scales == MATRIX else {self.scale}
        found = {
            name: dtype
            for name, dtype in dtypes.items()
            if name.rpartition(".")[2] in names
            and dtype in FLOATS
            and dtypes.get(f"{name.rpartition('.')[0]}.weight") == "F8_E4M3"
        }
        if not found:
            return self
        scale = next(iter(found)).rpartition(".")[2]
        return replace(self, scale=scale, scale_dtype=one_scale_dtype(found, "FP8"))

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """None: all parts are kept."""
        return {}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in], that of the codes."""
        return parts["weight"]

    def nbytes(self, out_features: int, in_features: int) -> int:
        """out * in + the bytes of its scales."""
        return parts_nbytes(self.parts(out_features, in_features).values())

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = code * scale -> [..., out, in] in the dtype of the scales; codes are exact in each of them.

        Raises CheckpointError where codes and scales do not belong together.
        """
        import torch

        codes, scales = parts["weight"], parts[self.scale]
        *lead, out_features, in_features = codes.shape
        needed = [*lead, *self.parts(out_features, in_features)[self.scale][1]]
        if codes.dtype != torch.float8_e4m3fn or list(scales.shape) != needed:
            raise CheckpointError(
                f"weight is {codes.dtype} {list(codes.shape)} with {self.scale} {list(scales.shape)};"
                f" {self.name} needs torch.float8_e4m3fn and {needed}",
                next="compare the strategy in quantization_config with the publisher's",
            )
        rows = out_features if "out" in self.scales else 1
        return codes.to(scales.dtype) * scales.reshape(*lead, rows, 1)

    @property
    def rows_at(self) -> int:
        return 1

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        scales = parts[self.scale]
        return {
            "weight": parts["weight"][first:last],
            self.scale: scales[first:last] if "out" in self.scales else scales,
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """scale = absmax / 448 of the matrix or row, code = e4m3(w / scale), in the dtype of the weight.

        Where all is zero the scale is that dtype's epsilon. Source: compressed-tensors' calculate_qparams.
        Raises CheckpointError on a weight that is not finite.
        """
        import torch

        finite(weight)
        weight = weight.detach()
        absmax = weight.abs().amax(dim=-1, keepdim=True)
        if "out" not in self.scales:
            absmax = absmax.amax(dim=-2, keepdim=True)
        scale = absmax / MAX_CODE
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
        codes = (weight / scale).clamp(-MAX_CODE, MAX_CODE).to(torch.float8_e4m3fn)
        shape = self.parts(*weight.shape[-2:])[self.scale][1]
        return {"weight": codes, self.scale: scale.reshape((*weight.shape[:-2], *shape))}


ONLY: dict[str, tuple[object, str]] = {"zero_point": (False, "zero points")}
KNOWN = frozenset(
    "num_bits type symmetric strategy group_size dynamic actorder block_structure observer observer_kwargs"
    " scale_dtype zp_dtype".split()
)


def read_float(where: str, weights: Table) -> Codec:
    """The codec of the `weights` of one compressed-tensors group of format "float-quantized".

    Also of "naive-quantized", where its weights are FP8. Raises Unreadable for what would be read wrongly.
    """
    refuse_other_values(weights, ONLY, f"{where}.weights")
    if weights.get("type") != "float" or weights.get("num_bits") != 8:
        raise Unreadable(f"{where}: {weights.get('type')} weights with num_bits {weights.get('num_bits')}")
    if weights.get("symmetric", True) is not True or weights.get("dynamic"):
        raise Unreadable(f"{where}: asymmetric or dynamic weights")
    strategy = weights.get("strategy") or "tensor"
    if strategy == "block":
        block = weights.get("block_structure")
        if isinstance(block, str):  # older releases write "128x128"
            block = [int(side) if side.isdecimal() else side for side in block.split("x")]
        return fp8.Fp8(fp8.block_size(block, f"{where}: block_structure"), scale="weight_scale")
    shapes = {"tensor": ONE, "channel": COLUMN}
    if not isinstance(strategy, str) or strategy not in shapes:
        raise Unreadable(f'{where}: FP8 weights with strategy "{strategy}"')
    return Fp8Scaled(shapes[strategy])


def read_method(where: str, table: Table) -> Codec:
    """The codec of a quantization_config with quant_method "fp8": a scale for each block, or for a matrix.

    Raises Unreadable, naming it, for each variant that would be read wrongly.
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
        KNOWN | ONLY.keys(),
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
