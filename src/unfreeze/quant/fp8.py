"""FP8 e4m3 with a scale for each block: DeepSeek-V3, Kimi-K2-Instruct, the Qwen3-FP8 releases.

    w[o, i] = code[o, i] * scale[o // rows, i // columns]           one rounding, to the requested dtype

A block has 128 x 128 weights; the last ones of a row or column may be partial. Codes are float8_e4m3fn. A
scale is float32 or bf16, or a power of two in one byte (ue8m0, F8_E8M0). On disk it is called
weight_scale_inv, but is a factor nevertheless; compressed-tensors calls it weight_scale. A weight takes 1
byte and 4 / 16,384 of its scale, against 2 bytes in bf16.

Activations are not rounded. A server rounds them to FP8 as well (activation_scheme "dynamic"); in training
that would round the adapters' gradients too.

Source: transformers' finegrained_fp8 and compressed-tensors' float-quantized; bit-identical to them in
tests/quant/test_fp8.py and test_fp8_scaled.py. Partial blocks, which DeepSeek-V3 has (kv_a_proj_with_mqa: 576
rows), transformers refuses or reads with blocks of another size; those are compared with the formula in
float64.

Shapes: a matrix is [out, in], its scales [ceil(out / rows), ceil(in / columns)].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from unfreeze.quant.codec import Part, Table, Unreadable, finite, refuse_other_values
from unfreeze.quant.scaled import MAX_E4M3, Kind, Scaled, nonzero, to_e4m3

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

MAX_BLOCK = 2**20  # rows or columns that share a scale; more than any layer's width


@dataclass(frozen=True)
class Fp8(Scaled):
    """The codec. quant/codec.py documents each method.

    block        rows and columns that share one scale
    scale_dtype  dtype of the scales, in the files and in memory alike
    scale        the last part of their names: weight_scale_inv, weight_scale or, in DeepSeek-V4, scale
    """

    kind: ClassVar[Kind] = Kind(
        "FP8",
        "another weight_block_size",
        ("F32", "BF16", "F16", "F8_E8M0"),
        "compare quantization_config.weight_block_size with the publisher's",
    )
    block: tuple[int, int] = (128, 128)
    scale_dtype: str = "F32"
    scale: str = "weight_scale_inv"

    @property
    def name(self) -> str:
        return "fp8-block"

    @property
    def needs(self) -> str:
        return f"{self.name} in blocks of {self.block[0]} x {self.block[1]}"

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("weight", self.scale)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """weight float8_e4m3fn [out, in], weight_scale_inv [ceil(out/rows), ceil(in/columns)]."""
        rows, columns = self.block
        scales = (-(-out_features // rows), -(-in_features // columns))
        return {"weight": ("F8_E4M3", (out_features, in_features)), self.scale: (self.scale_dtype, scales)}

    @property
    def rows_at(self) -> int:
        return self.block[0]

    def rows_each(self, suffix: str) -> int:
        return self.block[0] if suffix == self.scale else 1

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = code * scale -> [..., out, in], computed in float32.

        In the dtype of the scales; bf16 if these are powers of two, which change no digit of a code. Raises
        CheckpointError if codes and scales do not belong together.
        """
        import torch

        out_features = self.compare(parts)[-2]
        scales, weight = parts[self.scale], parts["weight"].float()
        rows, columns = self.block
        by_row = scales.float().repeat_interleave(rows, -2)[..., :out_features, :]
        for place in range(by_row.shape[-1]):
            weight[..., place * columns : (place + 1) * columns] *= by_row[..., place, None]
        return weight.to(torch.bfloat16 if scales.dtype == torch.float8_e8m0fnu else scales.dtype)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """scale = absmax / 448 of each block, code = e4m3(w * (448 / absmax)); a block of zeros has scale 1.

        With ue8m0 scales the next power of two above that.
        Source: transformers' Fp8Quantize. If the scales are called weight_scale, as in compressed-tensors:
        code = e4m3(w / scale) in the dtype of the weight, and a block of zeros has that dtype's epsilon as
        scale. Raises CheckpointError on a weight that is not finite.
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
            inverse = nonzero(absmax / MAX_E4M3)
            blocks.div_(inverse[..., :, None, :, None])
        else:
            scales = torch.where(absmax > 0, MAX_E4M3 / absmax, 1.0)
            inverse = 1.0 / scales
            if dtype == "F8_E8M0":
                tiny = torch.finfo(torch.float32).tiny
                inverse = torch.pow(2.0, inverse.clamp(min=tiny).log2().ceil()).to(torch.float8_e8m0fnu)
                scales = 1.0 / inverse.float()
            blocks.mul_(scales[..., :, None, :, None])
        return {"weight": to_e4m3(whole[..., :out_features, :in_features]).contiguous(), self.scale: inverse}


ONLY: dict[str, tuple[object, str]] = {
    "config_groups": ({}, "groups of modules in other formats"),
    "quant_algo": (None, "another format beside FP8"),
}
FIELDS: frozenset[str] = frozenset(ONLY) | frozenset(
    "fmt scale_fmt weight_block_size modules_to_not_convert ignored_layers activation_scheme"
    " dequantize kv_cache_scheme".split()
)
"""Fields that are read, or have no effect on packed weights."""


def refuse_variants(where: str, table: Table) -> None:
    """Raise Unreadable naming each variant of quant_method "fp8" that would be read wrongly."""
    refuse_other_values(table, ONLY, where)
    if table.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise Unreadable(f'{where}: fmt "{table.get("fmt")}"')
    if table.get("scale_fmt") not in (None, "ue8m0", "float"):
        raise Unreadable(f'{where}: scale_fmt "{table.get("scale_fmt")}"')


def block_size(block: object, where: str) -> tuple[int, int]:
    """(rows, columns) of a block. Raises Unreadable for anything but two numbers in range."""
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
