"""FP8 e4m3 with a scale for each block: DeepSeek-V3, Kimi-K2-Instruct, the Qwen3-FP8 releases.

    w[o, i] = code[o, i] * scale[o // rows, i // columns]           one rounding, to the dtype asked for

A block has 128 x 128 weights; the last ones of a row or column may be cut off. Codes are float8_e4m3fn.
A scale is float32 or bf16, or a power of two in one byte (ue8m0, F8_E8M0). On disk it is called
weight_scale_inv, and it multiplies all the same; compressed-tensors calls it weight_scale.
A weight takes 1 byte and 4 / 16,384 of its scale, against 2 bytes in bf16.

Activations stay as they are. A server rounds them to FP8 as well (activation_scheme "dynamic"); here nothing
is rounded in training, as the adapters' gradients would be too.
Source: transformers' finegrained_fp8 and compressed-tensors' float-quantized; equal to them bit for bit in
tests/quant/test_fp8.py and test_fp8_scaled.py. Blocks that are
cut off, which DeepSeek-V3 has (kv_a_proj_with_mqa: 576 rows), it refuses or reads with blocks of another
size; those are compared with the formula in float64.

Shapes: a matrix is [out, in], its scales [ceil(out / rows), ceil(in / columns)].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from unfreeze.core.errors import CheckpointError
from unfreeze.quant.codec import (
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

MAX_BLOCK = 2**20  # rows or columns that share a scale; more than the widest layer has
MAX_CODE = 448.0  # the largest float8_e4m3fn
SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class Fp8:
    """The codec. quant/codec.py says what each method promises.

    block        rows and columns that share one scale
    scale_dtype  dtype of the scales, in the files and in memory alike
    scale        their last name part: weight_scale_inv, or weight_scale as compressed-tensors writes it
    """

    block: tuple[int, int] = (128, 128)
    scale_dtype: str = "F32"
    name: str = field(default="fp8-block", init=False, repr=False)
    scale: str = "weight_scale_inv"
    variants: str = field(default="another weight_block_size", init=False, repr=False, compare=False)

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("weight", self.scale)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """weight float8_e4m3fn [out, in], weight_scale_inv [ceil(out/rows), ceil(in/columns)]."""
        rows, columns = self.block
        scales = (-(-out_features // rows), -(-in_features // columns))
        return {"weight": ("F8_E4M3", (out_features, in_features)), self.scale: (self.scale_dtype, scales)}

    def as_stored(self, dtypes: Mapping[str, str]) -> Fp8:
        """This codec with the scale_dtype of the files."""
        found = {
            name: dtype
            for name, dtype in dtypes.items()
            if name.rpartition(".")[2] == self.scale
            and dtype in SCALES
            and dtypes.get(f"{name.rpartition('.')[0]}.weight") in (None, "F8_E4M3")
        }
        return replace(self, scale_dtype=one_scale_dtype(found, "FP8")) if found else self

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """None: all parts are kept."""
        return {}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in], that of the codes."""
        return parts["weight"]

    def nbytes(self, out_features: int, in_features: int) -> int:
        """out * in + scale_dtype's size * blocks."""
        return parts_nbytes(self.parts(out_features, in_features).values())

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = code * scale -> [..., out, in], computed in float32.

        In the dtype of the scales; bf16 where these are powers of two, which change no digit of a code.
        Raises CheckpointError where codes and scales do not belong together.
        """
        import torch

        codes, scales = parts["weight"], parts[self.scale]
        out_features, in_features = codes.shape[-2:]
        needed = [*codes.shape[:-2], *self.parts(out_features, in_features)[self.scale][1]]
        if codes.dtype != torch.float8_e4m3fn or list(scales.shape) != needed:
            raise CheckpointError(
                f"weight is {codes.dtype} {list(codes.shape)} with {self.scale} {list(scales.shape)};"
                f" blocks of {self.block[0]} x {self.block[1]} need torch.float8_e4m3fn and {needed}",
                next="compare quantization_config.weight_block_size with the publisher's",
            )
        rows, columns = self.block
        by_row = scales.float().repeat_interleave(rows, -2)[..., :out_features, :]
        weight = codes.float()
        for place in range(by_row.shape[-1]):
            weight[..., place * columns : (place + 1) * columns] *= by_row[..., place, None]
        return weight.to(torch.bfloat16 if scales.dtype == torch.float8_e8m0fnu else scales.dtype)

    @property
    def rows_at(self) -> int:
        return self.block[0]

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        down = self.block[0]
        return {
            "weight": parts["weight"][first:last],
            self.scale: parts[self.scale][first // down : -(-last // down)],
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """scale = absmax / 448 of each block, code = e4m3(w * (448 / absmax)); a block of zeros has scale 1.

        With ue8m0 scales the next power of two above that. Source: transformers' Fp8Quantize.
        Where the scales are called weight_scale as compressed-tensors does: code = e4m3(w / scale) in the
        dtype of the weight, the scale of a block of zeros that dtype's epsilon.
        Raises CheckpointError on a weight that is not finite.
        """
        import torch

        finite(weight)
        out_features, in_features = weight.shape[-2:]
        (rows, columns), lead = self.block, weight.shape[:-2]
        dtype, (down, across) = self.parts(out_features, in_features)[self.scale]
        divides = self.scale == "weight_scale"
        kind = weight.dtype if divides else torch.float32
        whole = torch.zeros(*lead, down * rows, across * columns, dtype=kind, device=weight.device)
        whole[..., :out_features, :in_features] = weight.detach()
        blocks = whole.view(*lead, down, rows, across, columns)
        absmax = blocks.abs().amax(dim=(-3, -1))
        if divides:
            inverse = absmax / MAX_CODE
            inverse = torch.where(inverse == 0, torch.finfo(kind).eps, inverse)
            blocks.div_(inverse[..., :, None, :, None]).clamp_(-MAX_CODE, MAX_CODE)
            codes = whole[..., :out_features, :in_features].to(torch.float8_e4m3fn)
            return {"weight": codes.contiguous(), self.scale: inverse}
        scales = torch.where(absmax > 0, MAX_CODE / absmax, 1.0)
        inverse = 1.0 / scales
        if dtype == "F8_E8M0":
            tiny = torch.finfo(torch.float32).tiny
            inverse = torch.pow(2.0, inverse.clamp(min=tiny).log2().ceil()).to(torch.float8_e8m0fnu)
            scales = 1.0 / inverse.float()
        blocks.mul_(scales[..., :, None, :, None]).clamp_(-MAX_CODE, MAX_CODE)
        codes = whole[..., :out_features, :in_features].to(torch.float8_e4m3fn)
        return {"weight": codes.contiguous(), self.scale: inverse}


ONLY: dict[str, tuple[object, str]] = {
    "config_groups": ({}, "groups of modules in other formats"),
    "quant_algo": (None, "another format beside FP8"),
}
FIELDS: frozenset[str] = frozenset(ONLY) | frozenset(
    "fmt scale_fmt weight_block_size modules_to_not_convert ignored_layers activation_scheme"
    " dequantize kv_cache_scheme".split()
)
"""Fields that are read, or without effect on weights that are packed already."""


def refuse_variants(where: str, table: Table) -> None:
    """Raise Unreadable, naming it, for each variant of quant_method "fp8" that would be read wrongly."""
    refuse_other_values(table, ONLY, where)
    if table.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise Unreadable(f'{where}: fmt "{table.get("fmt")}"')
    if table.get("scale_fmt") not in (None, "ue8m0", "float"):
        raise Unreadable(f'{where}: scale_fmt "{table.get("scale_fmt")}"')


def block_size(block: object, where: str) -> tuple[int, int]:
    """(rows, columns) of a block. Raises Unreadable for anything else than two numbers in range."""
    entries = cast("list[object]", block) if isinstance(block, list) else []
    sizes = [size for size in entries if isinstance(size, int) and not isinstance(size, bool)]
    if len(entries) != 2 or len(sizes) != 2 or not all(1 <= size <= MAX_BLOCK for size in sizes):
        raise Unreadable(f"{where} {block!r:.60}")
    return sizes[0], sizes[1]


def read(where: str, table: Table) -> Fp8:
    """The codec of a quantization_config with quant_method "fp8" and a weight_block_size."""
    refuse_variants(where, table)
    scale = "F8_E8M0" if table.get("scale_fmt") == "ue8m0" else "F32"
    return Fp8(block_size(table.get("weight_block_size"), f"{where}: weight_block_size"), scale)
