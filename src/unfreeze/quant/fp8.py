"""FP8 e4m3 with a scale for each block: DeepSeek-V3, Kimi-K2-Instruct, the Qwen3-FP8 releases.

    w[o, i] = code[o, i] * scale[o // rows, i // columns]           one rounding, to the dtype asked for

A block has 128 x 128 weights; the last ones of a row or column may be cut off. Codes are float8_e4m3fn.
A scale is float32 or bf16, or a power of two in one byte (ue8m0, F8_E8M0). On disk it is called
weight_scale_inv, and it multiplies all the same.
A weight takes 1 byte and 4 / 16,384 of its scale, against 2 bytes in bf16.

Activations stay as they are. A server rounds them to FP8 as well (activation_scheme "dynamic"); here nothing
is rounded in training, as the adapters' gradients would be too.
Source: transformers' finegrained_fp8; equal to it bit for bit in tests/quant/test_fp8.py. Blocks that are
cut off, which DeepSeek-V3 has (kv_a_proj_with_mqa: 576 rows), it refuses or reads with blocks of another
size; those are compared with the formula in float64.

Shapes: a matrix is [out, in], its scales [ceil(out / rows), ceil(in / columns)].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from unfreeze.core.errors import CheckpointError
from unfreeze.quant.codec import Format, Part, Table, Unreadable, parts_nbytes, refuse_other_values

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = ("weight", "weight_scale_inv")
MAX_BLOCK = 2**20  # rows or columns that share a scale; more than the widest layer has
MAX_CODE = 448.0  # the largest float8_e4m3fn
SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class Fp8:
    """The codec. quant/codec.py says what each method promises.

    block        rows and columns that share one scale
    scale_dtype  dtype of the scales, in the files and in memory alike
    """

    block: tuple[int, int] = (128, 128)
    scale_dtype: str = "F32"
    name: str = field(default="fp8-block", init=False, repr=False)
    suffixes: tuple[str, ...] = field(default=SUFFIXES, init=False, repr=False)
    variants: str = field(default="another weight_block_size", init=False, repr=False, compare=False)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """weight float8_e4m3fn [out, in], weight_scale_inv [ceil(out/rows), ceil(in/columns)]."""
        rows, columns = self.block
        scales = (-(-out_features // rows), -(-in_features // columns))
        return {
            "weight": ("F8_E4M3", (out_features, in_features)),
            "weight_scale_inv": (self.scale_dtype, scales),
        }

    def as_stored(self, dtypes: Mapping[str, str]) -> Fp8:
        """This codec with the scale_dtype of the files."""
        first: dict[str, str] = {}
        for name, dtype in dtypes.items():
            if name.rpartition(".")[2] == "weight_scale_inv" and dtype in SCALES:
                first.setdefault(dtype, name)
        if len(first) > 1:
            named = ", ".join(f"{name} is {dtype}" for dtype, name in first.items())
            raise CheckpointError(
                f"the scales of FP8 weights have {len(first)} dtypes: {named}",
                next="convert them to the widest of these",
            )
        return replace(self, scale_dtype=next(iter(first))) if first else self

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

        codes, scales = parts["weight"], parts["weight_scale_inv"]
        out_features, in_features = codes.shape[-2:]
        needed = [*codes.shape[:-2], *self.parts(out_features, in_features)["weight_scale_inv"][1]]
        if codes.dtype != torch.float8_e4m3fn or list(scales.shape) != needed:
            raise CheckpointError(
                f"weight is {codes.dtype} {list(codes.shape)} with weight_scale_inv {list(scales.shape)};"
                f" blocks of {self.block[0]} x {self.block[1]} need torch.float8_e4m3fn and {needed}",
                next="compare quantization_config.weight_block_size with the publisher's",
            )
        rows, columns = self.block
        by_row = scales.float().repeat_interleave(rows, -2)[..., :out_features, :]
        weight = codes.float()
        for place in range(by_row.shape[-1]):
            weight[..., place * columns : (place + 1) * columns] *= by_row[..., place, None]
        return weight.to(torch.bfloat16 if scales.dtype == torch.float8_e8m0fnu else scales.dtype)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """scale = absmax / 448 of each block, code = e4m3(w * (448 / absmax)); a block of zeros has scale 1.

        With ue8m0 scales the next power of two above that. Source: transformers' Fp8Quantize.
        Raises CheckpointError on a weight that is not finite.
        """
        import torch

        if not bool(weight.isfinite().all()):
            bad = int((~weight.isfinite()).sum())
            raise CheckpointError(
                f"{bad} of {weight.numel()} weights are NaN or infinite and cannot be quantized"
            )
        out_features, in_features = weight.shape[-2:]
        (rows, columns), lead = self.block, weight.shape[:-2]
        dtype, (down, across) = self.parts(out_features, in_features)["weight_scale_inv"]
        whole = torch.zeros(*lead, down * rows, across * columns, device=weight.device)
        whole[..., :out_features, :in_features] = weight.detach()
        blocks = whole.view(*lead, down, rows, across, columns)
        absmax = blocks.abs().amax(dim=(-3, -1))
        scales = torch.where(absmax > 0, MAX_CODE / absmax, 1.0)
        inverse = 1.0 / scales
        if dtype == "F8_E8M0":
            tiny = torch.finfo(torch.float32).tiny
            inverse = torch.pow(2.0, inverse.clamp(min=tiny).log2().ceil()).to(torch.float8_e8m0fnu)
            scales = 1.0 / inverse.float()
        blocks.mul_(scales[..., :, None, :, None]).clamp_(-MAX_CODE, MAX_CODE)
        codes = whole[..., :out_features, :in_features].to(torch.float8_e4m3fn)
        return {"weight": codes.contiguous(), "weight_scale_inv": inverse}


ONLY: dict[str, tuple[object, str]] = {
    "config_groups": ({}, "groups of modules in other formats"),
    "quant_algo": (None, "another format beside FP8"),
    "activation_scheme": ("dynamic", "activations with scales of their own"),
}
KNOWN = frozenset("fmt scale_fmt weight_block_size modules_to_not_convert".split())
"""Fields that are read, or without effect on weights that are packed already."""


def read(where: str, table: Table) -> Fp8:
    """The codec of a quantization_config with quant_method "fp8".

    Raises Unreadable, naming it, for each variant that would be read wrongly: other codes than e4m3, a scale
    for a whole matrix, static activations.
    """
    refuse_other_values(table, ONLY, where)
    if table.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise Unreadable(f'{where}: fmt "{table.get("fmt")}"')
    if table.get("scale_fmt") not in (None, "ue8m0", "float"):
        raise Unreadable(f'{where}: scale_fmt "{table.get("scale_fmt")}"')
    block = table.get("weight_block_size")
    if block is None:
        raise Unreadable(f"{where} without weight_block_size: FP8 with one scale for a matrix")
    entries = cast("list[object]", block) if isinstance(block, list) else []
    sizes = [size for size in entries if isinstance(size, int) and not isinstance(size, bool)]
    if len(entries) != 2 or len(sizes) != 2 or not all(1 <= size <= MAX_BLOCK for size in sizes):
        raise Unreadable(f"{where}: weight_block_size {block!r:.60}")
    scale = "F8_E8M0" if table.get("scale_fmt") == "ue8m0" else "F32"
    return Fp8((sizes[0], sizes[1]), scale)


FORMAT = Format(
    key="fp8",
    title="FP8 e4m3 with block scales",
    read=read,
    known=KNOWN | ONLY.keys(),
    suffixes=("weight_scale_inv",),
)
